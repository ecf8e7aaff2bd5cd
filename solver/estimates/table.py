"""Measured rates as a file.

One CSV with a header, or a Parquet file, with a row for each measurement; the columns of `COLUMNS`:

    chip      as in the fleet file or the chips that come along        tp       chips the engine's group has
    model     as in the fleet file                                     phase    prefill or decode
    requests  in the step                                              tokens   new tokens of each; 1 in decode
    context   tokens of each that are cached before                    seconds  of the step
    source    who measured it, and where it can be read

and that of `OPTIONAL`, which a table may have none of, and a row none in:

    engine    which kind was measured: vllm, sglang or lmdeploy

Repeats are rows of their own: their median counts, and their spread is the error of that point.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from deeplink.errors import RateError
from deeplink.solver.estimates.model import Model
from deeplink.solver.estimates.rates import Measurement, Phase, check
from deeplink.solver.estimates.roofline import Chip
from deeplink.solver.kinds import KINDS, Kind

COLUMNS = ("chip", "model", "tp", "phase", "requests", "tokens", "context", "seconds", "source")
OPTIONAL = ("engine",)
Row = Mapping[str, str]


def read(path: Path) -> list[Measurement]:
    """Raises RateError, which names the line and the column."""
    return list(parse(contents(path), str(path)))


def parse(text: str, name: str) -> Iterator[Measurement]:
    for line, row in records(text, name, COLUMNS):
        phase = row["phase"]
        if phase not in ("prefill", "decode"):
            raise _wrong(name, line, "phase", phase, "prefill or decode")
        context = figure(row, "context", name, line, least=0)
        if phase == "prefill" and context:
            raise _wrong(name, line, "context", row["context"], "0: prefill is measured without a cached prefix")
        engine = row.get("engine", "")
        if engine not in ("", *KINDS):
            raise _wrong(name, line, "engine", engine, f"{', '.join(KINDS)}, or nothing")
        yield Measurement(
            chip=row["chip"],
            model=row["model"],
            tp=int(figure(row, "tp", name, line, least=1)),
            phase=cast(Phase, phase),
            requests=int(figure(row, "requests", name, line, least=1)),
            tokens=int(figure(row, "tokens", name, line, least=1)),
            context=context,
            seconds=figure(row, "seconds", name, line, least=1e-9),
            source=row["source"],
            line=line,
            engine=cast(Kind, engine),
        )


def write(rows: Iterable[Measurement]) -> str:
    """The rows as `parse` reads them, with a column for the engine where one of them says it."""
    rows = list(rows)
    columns = COLUMNS + (OPTIONAL if any(row.engine for row in rows) else ())
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([getattr(row, name) for name in columns])
    return out.getvalue()


def possible(
    rows: Iterable[Measurement], models: Mapping[str, Model], chips: Mapping[str, Chip], kv_dtype: str = "bfloat16"
) -> tuple[list[Measurement], list[RateError]]:
    """The rows whose chip can be that fast, and for each other one why it cannot. A row whose model or chip is not
    known cannot be checked, which is an error too."""
    kept: list[Measurement] = []
    rejected: list[RateError] = []
    for row in rows:
        try:
            if row.model not in models or row.chip not in chips:
                which, known = ("model", models) if row.model not in models else ("chip", chips)
                raise RateError(
                    f"line {row.line}: nothing is known about this {which}",
                    field=which,
                    ours=str(getattr(row, which)),
                    theirs=", ".join(sorted(known)),
                    remedy=f"use one of the names, or describe the {which}",
                )
            check(row, models[row.model], chips[row.chip], kv_dtype)
        except RateError as exc:
            rejected.append(exc)
        else:
            kept.append(row)
    return kept, rejected


def contents(path: Path) -> str:
    """A file's text, unpacked if its name ends in .gz; a Parquet file as CSV, of which a row's line is one more than
    its number."""
    if path.suffix == ".parquet":
        return _of_parquet(path)
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as exc:
        raise RateError(f"cannot read {path}: {exc}", remedy="name a file, gzipped or not") from exc


def _of_parquet(path: Path) -> str:
    try:
        from pyarrow import ArrowException, parquet
        from pyarrow import csv as written
    except ImportError as exc:
        raise RateError(f"{path} needs pyarrow", remedy="pip install 'deeplink[parquet]', or write a CSV") from exc
    out = io.BytesIO()
    try:
        written.write_csv(parquet.read_table(path), out)
    except (OSError, ArrowException) as exc:
        raise RateError(f"cannot read {path}: {exc}", remedy="name a Parquet file of plain columns") from exc
    return out.getvalue().decode()


def records(text: str, name: str, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """The rows of a CSV that has these columns, each with its line."""
    try:
        yield from _records(csv.DictReader(io.StringIO(text)), name, columns)
    except csv.Error as exc:
        raise RateError(f"{name} is not a CSV: {exc}", remedy="write a table as in docs/solver.md") from exc


def _records(reader: csv.DictReader[str], name: str, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise RateError(
            f"{name}: line 1 has no column {missing[0]}",
            field=missing[0],
            ours=", ".join(reader.fieldnames or ()),
            theirs=", ".join(columns),
            remedy="write the header as in docs/solver.md",
        )
    for row in reader:
        if None in row.values() or None in row:
            raise RateError(
                f"{name}: line {reader.line_num} has another number of columns than the header",
                remedy="quote values that have commas",
            )
        yield reader.line_num, row


def figure(row: Row, column: str, name: str, line: int, *, least: float) -> float:
    """The number in a column of a row, which is at least `least`."""
    try:
        value = float(row[column])
    except ValueError as exc:
        raise _wrong(name, line, column, row[column], "a number") from exc
    if not least <= value < float("inf"):
        raise _wrong(name, line, column, row[column], f"at least {least:g}")
    return value


def _wrong(name: str, line: int, column: str, value: str, wanted: str) -> RateError:
    return RateError(
        f"{name}: line {line}: not a usable {column}",
        field=column,
        ours=repr(value),
        theirs=wanted,
        remedy="correct the row",
    )

"""Measured rates as a file, and other projects' tables in the same form.

One CSV, a header, one row per measurement; the columns of `COLUMNS`:

    chip      as in the fleet file or the chips that come along        tp       chips the engine's group has
    model     as in the fleet file                                     phase    prefill or decode
    requests  in the step                                              tokens   new tokens of each; 1 in decode
    context   tokens of each that are cached before                    seconds  of the step
    source    who measured it, and where it can be read

Repeats are rows of their own: their median counts, and their spread is the error of that point.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from deeplink.errors import RateError
from deeplink.solver.model import Model
from deeplink.solver.rates import Measurement, Phase, check
from deeplink.solver.roofline import Chip

COLUMNS = ("chip", "model", "tp", "phase", "requests", "tokens", "context", "seconds", "source")
Row = Mapping[str, str]


def read(path: Path) -> list[Measurement]:
    """Raises RateError, which names the line and the column."""
    return list(parse(_text(path), str(path)))


def parse(text: str, name: str) -> Iterator[Measurement]:
    for line, row in _rows(text, name, COLUMNS):
        phase = row["phase"]
        if phase not in ("prefill", "decode"):
            raise _wrong(name, line, "phase", phase, "prefill or decode")
        yield Measurement(
            chip=row["chip"],
            model=row["model"],
            tp=int(_number(row, "tp", name, line, least=1)),
            phase=cast(Phase, phase),
            requests=int(_number(row, "requests", name, line, least=1)),
            tokens=int(_number(row, "tokens", name, line, least=1)),
            context=_number(row, "context", name, line, least=0),
            seconds=_number(row, "seconds", name, line, least=1e-9),
            source=row["source"],
            line=line,
        )


def write(rows: Iterable[Measurement]) -> str:
    """The rows as `parse` reads them."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([getattr(row, name) for name in COLUMNS])
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


SPLITWISE = "Splitwise simulator (Mutinifni/splitwise-sim @ 8f99e7d, MIT), data/perf_model.csv"
SPLITWISE_CHIPS = {
    "a100-80gb": "NVIDIA A100 SXM 80GB",
    "h100-80gb": "NVIDIA H100 SXM",
    "h100-80gb-pcap": "NVIDIA H100 SXM, power-capped",
}


def splitwise(path: Path) -> list[Measurement]:
    """The runs of Splitwise: each is a prefill, and decode steps whose context grows from the prompt on."""
    columns = (
        "model",
        "hardware",
        "prompt_size",
        "batch_size",
        "token_size",
        "prompt_time",
        "token_time",
        "tensor_parallel",
    )
    found = []
    for line, row in _rows(_text(path), str(path), columns):
        number = partial(_number, row, name=str(path), line=line, least=1e-6)
        prompt, generated, requests = number("prompt_size"), number("token_size"), int(number("batch_size"))
        chip = SPLITWISE_CHIPS.get(row["hardware"], row["hardware"])
        for phase, tokens, context, key in (
            ("prefill", int(prompt), 0.0, "prompt_time"),
            ("decode", 1, prompt + generated / 2, "token_time"),
        ):
            found.append(
                Measurement(
                    chip=chip,
                    model=row["model"],
                    tp=int(number("tensor_parallel")),
                    phase=cast(Phase, phase),
                    requests=requests,
                    tokens=tokens,
                    context=context,
                    seconds=number(key) / 1e3,
                    source=SPLITWISE,
                    line=line,
                )
            )
    return found


HELIX = "Helix (Thesys-lab/Helix-ASPLOS25 @ 148b733, Apache-2.0), simulator/model_manager"
HELIX_CHIPS = {"a100": "NVIDIA A100 SXM 80GB", "v100": "NVIDIA V100", "l4": "NVIDIA L4", "t4": "NVIDIA T4"}
HELIX_CONTEXT = 1024.0
"""Helix' tables do not say how long the sequences of a decode step are."""


def helix(folder: Path, models: Mapping[str, Model]) -> list[Measurement]:
    """Helix' tables, which are milliseconds of one layer by tokens (prompts) or sequences (decode), one file per model,
    chips and phase. Its first row, no time for no work, says nothing."""
    found = []
    for path in sorted(folder.glob("*__*__*_bs2time.csv*")):
        model, chips, kind = path.name.split(".")[0].removesuffix("_bs2time").split("__")
        chip, _, count = chips.partition("x")
        phase: Phase = "prefill" if kind == "prompt" else "decode"
        if model not in models:
            raise RateError(f"{path.name}: nothing is known about this model", field="model", ours=model)
        for line, text in enumerate(_text(path).splitlines(), 1):
            size, _, milliseconds = text.partition(",")
            if float(size) <= 0 or float(milliseconds) <= 0:
                continue
            found.append(
                Measurement(
                    chip=HELIX_CHIPS.get(chip, chip),
                    model=model,
                    tp=int(count or 1),
                    phase=phase,
                    requests=1 if phase == "prefill" else int(size),
                    tokens=int(size) if phase == "prefill" else 1,
                    context=0.0 if phase == "prefill" else HELIX_CONTEXT,
                    seconds=float(milliseconds) / 1e3 * models[model].layers,
                    source=HELIX,
                    line=line,
                )
            )
    return found


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise RateError(f"cannot read {path}: {exc}", remedy="name a CSV file, gzipped or not") from exc


def _rows(text: str, name: str, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(io.StringIO(text))
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


def _number(row: Row, column: str, name: str, line: int, *, least: float) -> float:
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

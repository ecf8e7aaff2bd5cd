"""Recorded requests: when they came, how long their prompts and answers were. And what a workload they make."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import random
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

from deeplink.errors import FleetError
from deeplink.solver.fleets.fleet import Bucket, Request, Workload

WINDOW = 10.0
"""Seconds over which a burst is looked at."""
_MOST_TOKENS = 1 << 24
_MOST_DAYS = 366
"""What is counted for each window of a trace has to fit into memory."""


def read(path: Path) -> list[Request]:
    """A trace of Azure (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) or of Mooncake (JSON lines: timestamp in
    milliseconds, input_length, output_length), gzipped or not. Raises FleetError, which names the line."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except OSError as exc:
        raise _unread(path, exc.strerror or str(exc)) from exc
    except (EOFError, UnicodeDecodeError, zlib.error) as exc:
        raise _unread(path, str(exc)) from exc
    requests = sorted(_parse(text, path.name), key=lambda request: request.at)
    if len(requests) < 2:
        raise FleetError(f"the trace {path} has fewer than two requests", field="workload.trace", remedy="record more")
    first = requests[0].at
    if (days := (requests[-1].at - first) / 86400) > _MOST_DAYS:
        raise FleetError(
            f"the trace {path} covers {days:.0f} days",
            field="workload.trace",
            theirs=f"{_MOST_DAYS} days",
            remedy="correct its times, or give a part of it",
        )
    return [Request(r.at - first, r.prompt, r.output, r.cached) for r in requests]


def _unread(path: Path, why: str) -> FleetError:
    return FleetError(
        f"cannot read the trace {path}: {why}", field="workload.trace", remedy="name a file, gzipped or not"
    )


def _parse(text: str, name: str) -> Iterator[Request]:
    if text.lstrip()[:1] == "{":
        for number, line in enumerate(text.splitlines(), 1):
            try:
                yield _mooncake(line)
            except (KeyError, TypeError, ValueError, RecursionError) as exc:
                raise _wrong(name, number, exc) from exc
        return
    reader = csv.DictReader(io.StringIO(text))
    try:
        for row in reader:
            yield _azure(row)
    except (KeyError, TypeError, ValueError) as exc:
        raise _wrong(name, reader.line_num, exc) from exc
    except csv.Error as exc:  # a line counts once it has been read
        raise _wrong(name, reader.line_num + 1, exc) from exc


def _wrong(name: str, number: int, exc: Exception) -> FleetError:
    why = f"it has no {exc.args[0]}" if isinstance(exc, KeyError) else str(exc)
    return FleetError(
        f"{name}:{number}: not a request: {why}",
        field="workload.trace",
        remedy="give Azure's CSV or Mooncake's JSON lines",
        line=number,
    )


def _mooncake(line: str) -> Request:
    row = json.loads(line)
    return _request(row["timestamp"] / 1e3, row["input_length"], row["output_length"])


def _azure(row: dict[str, str]) -> Request:
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=timezone.utc).timestamp()
    return _request(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _request(at: float, prompt: int, output: int) -> Request:
    """Recorders count no tokens where a client went away; a model still has one to compute."""
    if not math.isfinite(at):
        raise ValueError(f"its time is {at}")
    for what, value in (("prompt", prompt), ("answer", output)):
        if not 0 <= value <= _MOST_TOKENS:
            raise ValueError(f"its {what} has {value} tokens, where 0 to {_MOST_TOKENS} can be")
    return Request(at, max(int(prompt), 1), max(int(output), 1))


def workload(requests: Sequence[Request], *, buckets: int, hits: float, source: str) -> Workload:
    """The rate, burstiness and lengths of a trace. Buckets split the prompts' lengths so that each has about as many
    tokens as the others, for tokens are what costs; a bucket's lengths are its means."""
    span = max(requests[-1].at, 1e-9)
    gaps = [b.at - a.at for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    ordered = sorted(requests, key=lambda r: (r.prompt, r.output))
    total = sum(r.prompt + r.output for r in ordered)
    parts: list[list[Request]] = [[] for _ in range(buckets)]
    seen = 0
    for request in ordered:
        parts[min(buckets - 1, seen * buckets // total)].append(request)
        seen += request.prompt + request.output
    return Workload(
        rate=(len(requests) - 1) / span,
        burstiness=variance / mean**2 if mean > 0 else 1.0,
        buckets=tuple(_bucket(part, len(ordered), hits) for part in parts if part),
        source=source,
    )


def _bucket(part: Sequence[Request], total: int, hits: float) -> Bucket:
    prompt = sum(r.prompt for r in part) / len(part)
    cached = hits * prompt + sum(r.cached for r in part) / len(part)
    longest = max(r.prompt for r in part)
    return Bucket(f"to {longest}", prompt, sum(r.output for r in part) / len(part), len(part) / total, cached, longest)


def bucket_of(buckets: Sequence[Bucket]) -> Callable[[Request], int]:
    """Which bucket a request belongs to: by its prompt, and among buckets of one prompt by the nearest answer."""
    uppers = [bucket.longest or bucket.prompt for bucket in buckets]
    ordered = sorted(set(uppers))
    alike = [[b for b, upper in enumerate(uppers) if upper == size] for size in ordered]

    def bucket(request: Request) -> int:
        mine = alike[min(bisect_left(ordered, request.prompt), len(ordered) - 1)]
        return mine[0] if len(mine) == 1 else min(mine, key=lambda b: abs(buckets[b].output - request.output))

    return bucket


def burst(requests: Sequence[Request], share: float = 0.95, window: float = WINDOW) -> float:
    """How many times the mean rate the rate of a window is that `share` of all windows do not exceed."""
    counts = [0] * (int(requests[-1].at // window) + 1)
    for request in requests:
        counts[int(request.at // window)] += 1
    ordered = sorted(counts)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / (sum(counts) / len(counts))


def scaled(requests: Sequence[Request], factor: float) -> list[Request]:
    """The same requests in the same order at `factor` times the rate; bursts keep their shape."""
    return [Request(r.at / factor, r.prompt, r.output, r.cached) for r in requests]


def made(load: Workload, count: int, seed: int = 0) -> list[Request]:
    """`count` requests as the workload says: times between them are gamma-distributed with its burstiness."""
    draw = random.Random(seed)
    shape = 1 / max(load.burstiness, 1e-9)
    weights = [bucket.share for bucket in load.buckets]
    requests, at = [], 0.0
    for _ in range(count):
        at += draw.gammavariate(shape, 1 / (load.rate * shape)) if load.burstiness > 0 else 1 / load.rate
        bucket = draw.choices(load.buckets, weights)[0]
        requests.append(Request(at, round(bucket.prompt), max(round(bucket.output), 1), round(bucket.cached)))
    return requests

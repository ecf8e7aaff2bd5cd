"""Recorded requests: when they came, how long their prompts and answers were. And what a workload they make."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

from deeplink.errors import FleetError
from deeplink.solver.fleet import Bucket, Request, Workload

WINDOW = 10.0
"""Seconds over which a burst is looked at."""


def read(path: Path) -> list[Request]:
    """A trace of Azure (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) or of Mooncake (JSON lines: timestamp in
    milliseconds, input_length, output_length), gzipped or not. Raises FleetError, which names the line."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise FleetError(f"cannot read the trace {path}: {exc}", field="workload.trace", remedy="name a file") from exc
    requests = sorted(_parse(text, path.name), key=lambda request: request.at)
    if len(requests) < 2:
        raise FleetError(f"the trace {path} has fewer than two requests", field="workload.trace", remedy="record more")
    first = requests[0].at
    return [Request(r.at - first, r.prompt, r.output, r.cached) for r in requests]


def _parse(text: str, name: str) -> Iterator[Request]:
    mooncake = text.lstrip()[:1] == "{"
    rows = enumerate(text.splitlines(), 1) if mooncake else enumerate(csv.DictReader(io.StringIO(text)), 2)
    for number, row in rows:
        try:
            yield _mooncake(row) if isinstance(row, str) else _azure(row)
        except (KeyError, TypeError, ValueError) as exc:
            raise FleetError(
                f"{name}:{number}: not a request: {exc!r}",
                field="workload.trace",
                remedy="give Azure's CSV or Mooncake's JSON lines",
                line=number,
            ) from exc


def _mooncake(line: str) -> Request:
    row = json.loads(line)
    return Request(row["timestamp"] / 1e3, _tokens(row["input_length"]), _tokens(row["output_length"]))


def _azure(row: dict[str, str]) -> Request:
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=timezone.utc).timestamp()
    return Request(at, _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"]))


def _tokens(value: str | int) -> int:
    return max(int(value), 1)


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

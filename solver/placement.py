"""The placement: one document that says what to start, who hands to whom, what to expect, and for how long it holds.

It is JSON with a version; `schema` is its published JSON schema. The same fleet gives the same bytes: nothing in it
depends on the time, the machine or the order of a set.

Versions:

1.  First.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from deeplink.errors import SolverError

VERSION = 1


class Record(msgspec.Struct, frozen=True, omit_defaults=False, forbid_unknown_fields=True):
    pass


class Rate(Record, frozen=True):
    """A predicted time in seconds: nine of ten times it is within `seconds / (1 + error)` and
    `seconds * (1 + error)`. `kind` is measured, interpolated, calibrated or datasheet."""

    what: str
    seconds: float
    error: float
    kind: str
    source: str


class Engine(Record, frozen=True):
    """`count` engines alike. `max_num_seqs` and `max_num_batched_tokens` are what the rates were taken for; 0 leaves it
    to the engine. `busy` is how busy the busiest resource is in the normal scenario."""

    name: str
    pool: str
    chip: str
    role: Literal["prefill", "decode", "both"]
    count: int
    tp: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_dtype: str
    busy: float
    rates: tuple[Rate, ...]


class Route(Record, frozen=True):
    """Requests of a bucket from engines `prefill` to engines `decode` (the same where one engine does it all): so many
    a second, which is `weight` of all of the bucket. `handoff` is what handing over adds, in seconds."""

    prefill: str
    decode: str
    bucket: str
    rate: float
    weight: float
    handoff: float


class Bucket(Record, frozen=True):
    name: str
    prompt: float
    output: float
    cached: float
    rate: float


class Range(Record, frozen=True):
    value: float
    low: float
    high: float


class Predicted(Record, frozen=True):
    """Seconds, in the normal scenario."""

    ttft_p50: Range
    ttft_p99: Range
    tpot_p50: Range
    tpot_p99: Range


class Simulated(Record, frozen=True):
    """Seconds of `requests` simulated requests, and the part of them within the service levels. `rounds` is how often
    engines had to be planned less busy for that, and `multiple` of the workload's rate the requests came at."""

    attained: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    requests: int
    rounds: int
    multiple: float


class Binding(Record, frozen=True):
    """A limit that holds the objective back, and by how much one more unit of it would change the objective if engines
    could be divided."""

    kind: str
    name: str
    shadow_price: float


class Relaxation(Record, frozen=True):
    what: str
    factor: float
    text: str


class Valid(Record, frozen=True):
    """While this holds nothing has to change: requests a second in all and of each bucket alone, the arrivals'
    burstiness, the part of their bandwidth that links keep at least."""

    rate_at_most: float
    bucket_at_most: dict[str, float]
    burstiness_at_most: float
    links_at_least: float


class Fallback(Record, frozen=True):
    """Engines that serve without any handoff, and how many requests a second they can serve in every scenario."""

    rate: float
    engines: dict[str, int]


class Split(Record, frozen=True):
    """What handing over is worth after its cost: the objective with and without it. None where there is no placement
    without."""

    split: float
    aggregated: float | None


class Sensitivity(Record, frozen=True):
    """If a pool's times were as slow, or as fast, as their error allows: the objective, or None where nothing serves
    the workload then; whether the best placement uses other chips or roles; and what part of the workload's rate this
    one still serves if they are slower. The first that changes the answer is what to measure next."""

    pool: str
    error: float
    slower: float | None
    faster: float | None
    changes: bool
    sustains: float


class Refused(Record, frozen=True):
    prefill: str
    decode: str
    why: str


class Point(Record, frozen=True):
    """The cheapest engines for a rate, in requests a second, and what they cost an hour, up to the relative `gap`."""

    rate: float
    cost: float
    gap: float
    engines: dict[str, int]


class Placement(Record, frozen=True):
    """`value` is the objective's: cost per hour, a multiple of the workload's rate, watts or seconds; `bound` is what
    no placement can beat, and `gap` their relative distance. With the status `model_too_uncertain` it is the best for
    the times as predicted, but some of those are so uncertain that perhaps nothing serves the workload; `sensitivity`
    says which."""

    version: int
    name: str
    model: str
    status: Literal["optimal", "feasible", "infeasible", "model_too_uncertain"]
    objective: str
    value: float
    unit: str
    bound: float
    gap: float
    rate: float
    cost: float
    watts: float
    buckets: tuple[Bucket, ...]
    engines: tuple[Engine, ...] = ()
    routes: tuple[Route, ...] = ()
    predicted: Predicted | None = None
    simulated: Simulated | None = None
    scenarios: tuple[str, ...] = ()
    bindings: tuple[Binding, ...] = ()
    valid_while: Valid | None = None
    fallback: Fallback | None = None
    split: Split | None = None
    sensitivity: tuple[Sensitivity, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()
    refused: tuple[Refused, ...] = ()
    skipped: tuple[str, ...] = ()


def encode(placement: Placement) -> bytes:
    """Indented JSON that ends with a newline."""
    return msgspec.json.format(msgspec.json.encode(placement), indent=2) + b"\n"


def decode(data: bytes) -> Placement:
    """What `encode` wrote. Raises SolverError for anything else."""
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("version")
        if version != VERSION:
            raise SolverError(
                "the placement has another version",
                field="version",
                ours=str(VERSION),
                theirs=str(version),
                remedy="solve the fleet again with this release",
            )
        return msgspec.json.decode(data, type=Placement)
    except (msgspec.DecodeError, RecursionError, AttributeError) as exc:
        raise SolverError(f"not a placement: {exc}", remedy="deeplink solve writes one with --out") from exc


def schema() -> dict[str, Any]:
    """The document's JSON schema."""
    return msgspec.json.schema(Placement)

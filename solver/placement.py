"""The placement: one document that says what to start, who hands to whom, what to expect, and for how long it holds.

It is JSON or TOML with a version; `schema` is its published JSON schema. The same fleet gives the same bytes: nothing
in it depends on the time, the machine or the order of a set. TOML has no null, so what is None is left out there.

Versions:

1.  First.
2.  `engines[].engine`, where that is not vLLM. A placement of vLLM alone is still of version 1, so that what reads only
    that reads it; either is read here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from deeplink.errors import SolverError
from deeplink.solver.kinds import DEFAULT, Kind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERSION = 2
_VERSIONS = (1, VERSION)
_LARGEST = 64 << 20
"""Bytes of a file."""


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
    """`count` engines alike, each of `tp` chips on `hosts` hosts. `max_num_seqs` and `max_num_batched_tokens` are what
    the rates were taken for; 0 leaves it to the engine. `busy` is how busy the busiest resource is in the normal
    scenario. `profile` is which of the chips that deeplink knows it runs on, "" if the chip's name says it; `flags`,
    `variables`, `image` and `casts` are the pool's. `engine` is the kind of engine, vLLM where it is left out."""

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
    profile: str = ""
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    image: str = ""
    casts: tuple[str, ...] = ()
    hosts: int = 1
    engine: Kind | msgspec.UnsetType = msgspec.UNSET

    @property
    def kind(self) -> Kind:
        return DEFAULT if self.engine is msgspec.UNSET else self.engine


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
    """`longest` is the longest prompt, 0 where all are alike."""

    name: str
    prompt: float
    output: float
    cached: float
    rate: float
    longest: float = 0.0


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
    aggregated: float | None = None


class Sensitivity(Record, frozen=True):
    """If a pool's times were as slow, or as fast, as their error allows: the objective, or None where nothing serves
    the workload then; whether the best placement uses other chips or roles; and what part of the workload's rate this
    one still serves if they are slower. The first that changes the answer is what to measure next."""

    pool: str
    error: float
    changes: bool
    sustains: float
    slower: float | None = None
    faster: float | None = None


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
    no placement can beat, and `gap` their relative distance. `checkpoint` is where engines find the model. With the
    status `model_too_uncertain` it is the best for the times as predicted, but some of those are so uncertain that
    perhaps nothing serves the workload; `sensitivity` says which."""

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
    checkpoint: str = ""


def encode(placement: Placement) -> bytes:
    """Indented JSON that ends with a newline."""
    return msgspec.json.format(msgspec.json.encode(placement), indent=2) + b"\n"


def encode_toml(placement: Placement) -> bytes:
    """Raises SolverError where the package that writes TOML is missing."""
    try:
        import tomli_w
    except ImportError as exc:
        raise SolverError("a package to write TOML is missing", remedy="pip install 'deeplink[solver]'") from exc
    return tomli_w.dumps(_without_none(msgspec.to_builtins(placement))).encode()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def load(path: Path) -> Placement:
    """A placement's file, TOML if it is called so. Raises SolverError, also for one that cannot be read or is larger
    than any placement."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as exc:
        raise SolverError(f"cannot read {path}: {exc.strerror}", remedy="deeplink solve writes one with --out") from exc
    if len(data) > _LARGEST:
        raise SolverError(f"{path} is not a placement: it is larger than {_LARGEST >> 20} MiB")
    return decode_toml(data) if path.suffix == ".toml" else decode(data)


def decode(data: bytes) -> Placement:
    """What `encode` wrote. Raises SolverError for anything else."""
    try:
        return _checked(msgspec.json.decode(data))
    except (msgspec.DecodeError, RecursionError) as exc:
        raise _not_one(exc) from exc


def decode_toml(data: bytes) -> Placement:
    """What `encode_toml` wrote. Raises SolverError for anything else."""
    try:
        return _checked(tomllib.loads(data.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _not_one(exc) from exc


def _checked(value: Any) -> Placement:
    version = value.get("version") if isinstance(value, dict) else None
    if version not in _VERSIONS:
        raise SolverError(
            "not a placement of a version that this release reads",
            field="version",
            ours=" or ".join(map(str, _VERSIONS)),
            theirs=str(version),
            remedy="solve the fleet again with this release",
        )
    try:
        placement = msgspec.convert(value, Placement)
    except msgspec.ValidationError as exc:
        raise _not_one(exc) from exc
    if version < (needed := version_of(placement.engines)):
        raise _not_one(ValueError(f"it is of version {version}, and names engines as only {needed} does"))
    return placement


def version_of(engines: Iterable[Engine]) -> int:
    """The lowest that can say which engines these are."""
    return VERSION if any(engine.kind != DEFAULT for engine in engines) else _VERSIONS[0]


def _not_one(why: Exception) -> SolverError:
    return SolverError(f"not a placement: {why}", remedy="deeplink solve writes one with --out")


def schema() -> dict[str, Any]:
    """The document's JSON schema."""
    return msgspec.json.schema(Placement)

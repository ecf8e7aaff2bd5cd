"""What is there, what is asked of it, and how well it must be done. The checked form of a fleet file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deeplink.kvconnector.contracts.contract import Contract
from deeplink.solver.estimates.model import Model
from deeplink.solver.estimates.rates import Measurement
from deeplink.solver.estimates.roofline import Chip, Fractions
from deeplink.solver.exact.highs import Effort
from deeplink.solver.exact.problem import Objective, Role
from deeplink.solver.kinds import Kind


@dataclass(frozen=True, slots=True)
class Start:
    """How a pool's engines are started besides what the placement decides: the profile of its chip, flags and variables
    of the engine's, and the container image that has engine and deeplink."""

    profile: str = ""
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    image: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Chips of one type in one place, `per_host` to a host; a group is a part of a host, or all of several.

    `tp` are the group sizes to consider; `dtype` and `layout` are those of the engines' KV cache, and `contract` an
    engine's statement where one is at hand, which then decides what can be handed over. `utilisation` is the part of
    a chip's memory that weights and cache may take; `pace` multiplies all times. `engine` is the kind of all of its
    engines. A `processor`'s memory is the host's.
    """

    name: str
    chip: Chip
    count: int
    per_host: int
    price: float
    watts: float
    roles: tuple[Role, ...]
    tp: tuple[int, ...]
    dtype: str
    layout: str
    casts: tuple[str, ...]
    utilisation: float
    fractions: Fractions
    engine: Kind
    pace: float = 1.0
    processor: bool = False
    current: tuple[tuple[Role, int, int], ...] = ()
    contract: Contract | None = None
    start: Start = field(default_factory=Start)


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded request: `at` is seconds from the first one. `cached` prompt tokens need no prefill."""

    at: float
    prompt: int
    output: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Connection:
    """`rate` is bytes a second one way, of each source's and target's chip where `per` is "chip", else in all."""

    source: str
    target: str
    rate: float
    latency: float
    per: Literal["chip", "link"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of similar lengths, in tokens; `share` of all requests. `cached` prompt tokens need no prefill.
    `longest` is the longest prompt, where they differ."""

    name: str
    prompt: float
    output: float
    share: float
    cached: float = 0.0
    longest: float = 0.0

    @property
    def new(self) -> float:
        return max(self.prompt - self.cached, 1.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """`rate` is requests a second; `burstiness` the squared coefficient of variation of the times between them, 1 for
    random arrivals. `source` says where it was taken from."""

    rate: float
    burstiness: float
    buckets: tuple[Bucket, ...]
    source: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """`percentile` of the requests get their first token within `ttft` seconds and, in the steady state, each further
    one within `tpot`. Times are planned `margin` shorter."""

    ttft: float
    tpot: float
    percentile: float = 0.99
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """The workload times `rate`, with `lost[pool]` of the named pools' chips gone."""

    name: str
    rate: float
    lost: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`replay` are a trace's requests, to know its queues by; `verify` those to simulate the placement with.
    `checkpoint` is where engines find the model, by default its name."""

    model: Model
    pools: tuple[Inventory, ...]
    workload: Workload
    service: Service
    objective: Objective
    connections: tuple[Connection, ...] = ()
    situations: tuple[Situation, ...] = ()
    budget: float = float("inf")
    link_share: float = 0.7
    effort: Effort = field(default_factory=Effort)
    measurements: tuple[Measurement, ...] = ()
    sensitivity: bool = True
    replay: tuple[Request, ...] = ()
    verify: tuple[Request, ...] = ()
    name: str = ""
    checkpoint: str = ""

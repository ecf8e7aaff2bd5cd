"""The sections of fleet.toml, as people write them. What a key means is in its description, and in docs/solver.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from deeplink.solver.kinds import Kind

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Strict):
    config: Annotated[Path, Field(description="the checkpoint's config.json, from where the fleet file is")]
    name: Annotated[str, Field(description="what rate tables and engines call it; default: the config's")] = ""
    checkpoint: Annotated[str, Field(description="where engines find it; default: its name")] = ""


class Lengths(_Strict):
    prompt: Positive
    output: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    share: Positive = 1.0


class WorkloadSection(_Strict):
    rate: (
        Annotated[float, Field(gt=0, allow_inf_nan=False, description="requests a second; default: the trace's")] | None
    ) = None
    burstiness: (
        Annotated[
            float,
            Field(
                ge=0, allow_inf_nan=False, description="squared coefficient of variation of the times between requests"
            ),
        ]
        | None
    ) = None
    prefix_hits: Annotated[float, Field(ge=0, lt=1, description="part of the prompts' tokens already cached")] = 0.0
    lengths: tuple[Lengths, ...] = ()
    trace: Annotated[Path | None, Field(description="a trace of Azure or Mooncake instead of lengths")] = None
    buckets: Annotated[int, Field(ge=1, le=16, description="into how many a trace is divided")] = 4


class ServiceSection(_Strict):
    ttft: Annotated[float, Field(gt=0, allow_inf_nan=False, description="seconds to the first token")]
    tpot: Annotated[float, Field(gt=0, allow_inf_nan=False, description="seconds for each further token")]
    percentile: Annotated[float, Field(gt=0.5, lt=1, description="part of the requests that get it")] = 0.99
    margin: Annotated[float, Field(ge=0, lt=1, description="part of the time to keep free")] = 0.0


class ChipSection(_Strict):
    name: str
    tflops: Annotated[float, Field(gt=0, description="dense, 16-bit")]
    tflops_8bit: Annotated[float, Field(ge=0, description="dense, 8-bit; 0: as 16-bit")] = 0.0
    memory_gb: Positive
    memory_gb_per_s: Positive
    link_gb_per_s: Annotated[float, Field(gt=0, description="to the other chips of its host, one way")] = 32.0
    watts: Annotated[float, Field(ge=0)] = 0.0
    source: Annotated[str, Field(min_length=1, description="who says so")]
    profile: Annotated[str, Field(description="which of the chips that deeplink knows it is, to start engines on")] = ""
    compute: Annotated[float, Field(gt=0, le=1, description="reached part of the operations, if measured")] | None = (
        None
    )
    memory: Annotated[float, Field(gt=0, le=1, description="reached part of the bandwidth, if measured")] | None = None
    error: Annotated[float, Field(gt=0, description="of times so predicted, relative")] = 0.3


class Current(_Strict):
    role: Literal["prefill", "decode", "both"]
    tp: Count
    engines: Count


class PoolSection(_Strict):
    name: str
    chip: Annotated[str, Field(description="of those that come along, or of [[chips]]")]
    count: Count
    per_host: Annotated[int, Field(ge=1, description="chips of one host")] = 8
    price: Annotated[float, Field(ge=0, allow_inf_nan=False, description="of a chip for an hour")] = 0.0
    watts: Annotated[float, Field(ge=0, description="of a chip; default: the chip's")] | None = None
    roles: tuple[Literal["prefill", "decode", "both"], ...] = ("prefill", "decode", "both")
    tp: Annotated[tuple[Count, ...], Field(description="sizes of tensor-parallel groups; default: powers of two")] = ()
    kv_dtype: Annotated[str, Field(description="element type of the KV cache; default: the model's")] = ""
    layout: Annotated[str, Field(description="the KV cache's layout, by name or as text; default: the engine's")] = ""
    casts: Annotated[tuple[str, ...], Field(description="lossy casts consented to")] = ()
    contract: Annotated[Path | None, Field(description="an engine's contract, which then decides about handoffs")] = (
        None
    )
    memory_share: Annotated[float, Field(gt=0, le=1, description="of a chip, for weights and cache")] = 0.9
    engine: Annotated[Kind, Field(description="which engine's commands are written")] = "vllm"
    flags: Annotated[tuple[str, ...], Field(description="further words of the engines' commands, last")] = ()
    env: Annotated[dict[str, str], Field(description="variables of the engines' environment")] = {}
    image: Annotated[str, Field(description="container image with engine and deeplink; default: one to be built")] = ""
    current: Annotated[tuple[Current, ...], Field(description="what runs now")] = ()


class LinkSection(_Strict):
    from_: Annotated[str, Field(alias="from")]
    to: str
    gb_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, description="10^9 bytes a second")]
    convention: Annotated[
        Literal["one-way", "both-ways"], Field(description="both-ways: the figure is the sum of the two directions")
    ]
    per: Annotated[Literal["chip", "link"], Field(description="whether each chip has it or all share it")]
    latency_ms: Annotated[float, Field(ge=0)] = 0.0
    both: Annotated[bool, Field(description="also in the other direction")] = False


class ScenarioSection(_Strict):
    name: str
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False, description="times the workload's")] | Literal["burst"] = (
        1.0
    )
    lost: Annotated[dict[str, Share], Field(description="part of a pool's chips that are gone")] = {}


class RatesSection(_Strict):
    table: Annotated[Path, Field(description="measured rates; a file, or a folder of them")]
    format: Literal["csv", "splitwise", "vllm-bench", "aiconfigurator", "vidur"] = "csv"
    chip: Annotated[str, Field(description="which chip these are of, of the pools'; csv and splitwise say it")] = ""
    tp: Annotated[int, Field(ge=1, description="how many of them one engine had, or has")] = 1
    engine: Annotated[Kind | None, Field(description="which engine these are of, where the table does not say")] = None


class SolveSection(_Strict):
    gap: Annotated[float, Field(gt=0, lt=1, description="proven distance to the optimum to stop at")] = 1e-4
    seconds: Annotated[float, Field(gt=0, description="to stop after in any case, for each objective")] = 60.0
    link_share: Annotated[float, Field(gt=0, le=1, description="part of a link that may be in use")] = 0.7
    sensitivity: Annotated[bool, Field(description="solve again with uncertain times slower and faster")] = True
    verify: Annotated[bool, Field(description="simulate the placement, and plan less busy engines if it is late")] = (
        False
    )


class FleetFile(_Strict):
    version: Literal[1]
    name: str = ""
    objective: Literal["cost", "throughput", "capacity", "energy", "latency"] = "cost"
    budget: Annotated[float, Field(gt=0, description="most that all chips may cost an hour")] = float("inf")
    model: ModelSection
    workload: WorkloadSection
    service: ServiceSection
    pools: Annotated[tuple[PoolSection, ...], Field(min_length=1)]
    chips: tuple[ChipSection, ...] = ()
    links: tuple[LinkSection, ...] = ()
    scenarios: tuple[ScenarioSection, ...] = ()
    rates: tuple[RatesSection, ...] = ()
    solve: SolveSection = SolveSection()

"""Tables of kernels, put together into steps."""

from __future__ import annotations

import gzip
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from described import CONFIG, FLEET, write

from deeplink.errors import RateError
from deeplink.solver.estimates import aiconfigurator, catalogue, kernels, table, vidur
from deeplink.solver.estimates import model as models
from deeplink.solver.estimates.rates import Measurement, Rates
from deeplink.solver.fleets import fleetfile
from deeplink.solver.place import place

CHIP = catalogue.chip("NVIDIA H100 SXM")
DENSE = CONFIG
LAUNCHES = 64 * kernels.LAUNCH


def file(path: Path, header: str, rows: Any) -> None:
    text = "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"
    path.write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A chip that reaches half of its peaks with every kernel, and 10 microseconds for each all-reduce."""

    def twice(seconds: float) -> float:
        return 2e3 * seconds

    gemms = product((1, 64, 1024, 8192), (1024, 8192, 65536), (1024, 8192))
    file(
        tmp_path / "h100_sxm__vllm1.2.3__gemm_perf_bf16.csv.gz",
        "device,version,gemm_dtype,m,n,k,latency",
        (("d", "v", "bfloat16", *size, twice(kernels.gemm(CHIP, *size))) for size in gemms),
    )
    for kernel, column, ideal in (
        ("context", "isl", kernels.context_attention),
        ("generation", "step", kernels.generation_attention),
    ):
        sizes = product((1, 16, 256), (128, 1024, 8192), (8, 32, 64), (1, 8))
        file(
            tmp_path / f"h100_sxm__vllm1.2.3__{kernel}_attention_perf_bf16.csv.gz",
            f"device,version,batch_size,{column},num_heads,num_key_value_heads,head_dim,latency",
            (("d", "v", *size, 128, twice(ideal(CHIP, *size))) for size in sizes),
        )
    file(
        tmp_path / "h100_sxm__vllm1.2.3__custom_allreduce.csv.gz",
        "kernel_source,num_gpus,message_size,latency",
        (("vLLM_custom_graph", chips, size, 0.01) for chips in (2, 4, 8) for size in (128, 1 << 20, 1 << 30)),
    )
    return tmp_path


def by_phase(rows: list[Measurement]) -> dict[str, list[Measurement]]:
    return {phase: [row for row in rows if row.phase == phase] for phase in ("prefill", "decode")}


def test_kernels_at_half_their_peaks_are_steps_at_half_their_peaks(tables: Path) -> None:
    rows = aiconfigurator.read(tables, CHIP, DENSE, "m", 1)
    shape = models.parse(DENSE, "m")
    kept, rejected = table.possible(rows, {"m": shape}, {CHIP.name: CHIP})
    assert not rejected
    assert len(kept) == len(kernels.PROMPTS) + len(kernels.BATCHES) * len(kernels.CONTEXTS)
    large = max(by_phase(rows)["prefill"], key=lambda row: row.tokens)
    flops = 2 * shape.active * large.tokens + shape.attention_flops(large.tokens, large.tokens / 2)
    assert large.seconds == pytest.approx(2 * flops / CHIP.peak(16) + LAUNCHES, rel=0.1)
    small = next(row for row in by_phase(rows)["decode"] if row.requests == 1)
    assert small.seconds == pytest.approx(2 * shape.shared * 2 / CHIP.bandwidth + LAUNCHES, rel=0.1)
    assert {row.error for row in rows} == {kernels.ERROR}
    assert all("aiconfigurator 1.2.3" in row.source for row in rows)


def test_groups_share_the_work_and_tell_each_other(tables: Path) -> None:
    alone, four = (aiconfigurator.read(tables, CHIP, DENSE, "m", tp) for tp in (1, 4))
    told = 2 * 64 * 1e-5
    for one, other in zip(alone, four, strict=True):
        assert other.seconds - LAUNCHES == pytest.approx((one.seconds - LAUNCHES) / 4 + told, rel=0.2)


def test_what_is_put_together_is_not_called_measured(tables: Path) -> None:
    rows = aiconfigurator.read(tables, CHIP, DENSE, "m", 1)
    rates = Rates(models.parse(DENSE, "m"), CHIP, 1, "bfloat16", catalogue.fractions(CHIP), rows)
    for rate in (rates.prefill(1024), rates.prefill(1500), rates.decode(8, 1024), rates.decode(9, 1500)):
        assert rate.kind == "interpolated"
        assert rate.error >= kernels.ERROR


def vidur_tables(folder: Path) -> None:
    names = [f"time_stats.{name}.median" for name in vidur.LINEAR]
    rows = [
        (*[0.01 * max(tokens, 100) / 100 / tp] * len(names), 64, 8, 5120, 25600, tokens, tp)
        for tokens in (1, 64, 512, 4096)
        for tp in (1, 2)
    ]
    columns = [*names, "n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens", "num_tensor_parallel_workers"]
    file(folder / "h100__a-model__mlp.csv.gz", ",".join(columns), rows)
    file(
        folder / "h100_dgx__all_reduce.csv.gz",
        "time_stats.all_reduce.median,num_workers,size,devices_per_node",
        ((0.02, 2, size, 2) for size in (1024, 1 << 28)),
    )


def test_vidur(tmp_path: Path) -> None:
    vidur_tables(tmp_path)
    one, two = (vidur.read(tmp_path, CHIP, DENSE, "m", tp) for tp in (1, 2))
    first = next(row for row in one if row.phase == "decode" and row.requests == 1)
    assert first.seconds >= 64 * 9 * 1e-5
    assert max(row.tokens for row in one) == 4096  # nothing beyond the profile
    for alone, both in zip(one, two, strict=True):
        assert both.seconds < alone.seconds + 64 * 2 * 2e-5
    with pytest.raises(RateError, match="no profile of such a model"):
        vidur.read(tmp_path, CHIP, {**DENSE, "hidden_size": 4096}, "m", 1)
    with pytest.raises(RateError, match="no profile of such a model"):
        vidur.read(tmp_path, CHIP, DENSE, "m", 4)


def test_what_no_table_has_is_told(tmp_path: Path, tables: Path) -> None:
    with pytest.raises(RateError, match="no table is of NVIDIA H20"):
        aiconfigurator.read(tables, catalogue.chip("NVIDIA H20"), DENSE, "m", 1)
    with pytest.raises(RateError, match="has no gemm_perf"):
        aiconfigurator.read(tmp_path / "none", CHIP, DENSE, "m", 1)
    experts = {**DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    with pytest.raises(RateError, match="are in no table"):
        aiconfigurator.read(tables, CHIP, experts, "m", 1)
    with pytest.raises(RateError, match="no all-reduce of 16"):
        aiconfigurator.read(tables, CHIP, DENSE, "m", 16)


def test_a_fleet_file_takes_them(tables: Path) -> None:
    rates = '[[rates]]\ntable = "."\nformat = "aiconfigurator"\nchip = "NVIDIA H100 SXM"\ntp = 2\n'
    found = place(fleetfile.load(write(tables, FLEET + rates)))
    sources = {rate.source for engine in found.engines if engine.pool == "hopper" for rate in engine.rates}
    assert any("aiconfigurator" in source for source in sources)

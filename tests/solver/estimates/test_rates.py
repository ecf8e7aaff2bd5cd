"""What is known about chips and models, and what is made of measurements."""

from __future__ import annotations

import contextlib
import math
from importlib.resources import files
from pathlib import Path

import pytest
from described import CONFIG

from deeplink.errors import FleetError, RateError
from deeplink.solver.estimates import calibrate, catalogue, importers, model, roofline, surface, table
from deeplink.solver.estimates.rates import Measurement, Rates, check
from deeplink.solver.estimates.roofline import Step

DATA = Path(str(files("deeplink.solver"))) / "data"
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def test_grouped_heads() -> None:
    qwen = model.parse(CONFIG)
    assert qwen.kv_bytes("bfloat16") == 262_144
    assert qwen.parameters == pytest.approx(32.76e9, rel=0.001)


def test_experts_and_latent_attention() -> None:
    deepseek = model.parse(DEEPSEEK)
    assert deepseek.parameters == pytest.approx(671e9, rel=0.001)
    assert deepseek.active == pytest.approx(37e9, rel=0.02)
    assert deepseek.kv_bytes("bfloat16") == 61 * 576 * 2
    assert deepseek.weight_bytes == pytest.approx(671e9, rel=0.01)
    assert deepseek.read_bytes(1) == pytest.approx(deepseek.active, rel=0.01)
    assert deepseek.read_bytes(1e6) == pytest.approx(deepseek.parameters - deepseek.embedding, rel=0.001)


def test_four_bits_and_their_scales() -> None:
    awq = model.parse({**CONFIG, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})
    assert awq.bits == 4 + 16 / 128


def test_a_window() -> None:
    config = {**CONFIG, "sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 32}
    half = model.parse(config)
    assert half.full_layers == 32
    assert half.attention_flops(1, 8192) == model.parse(CONFIG).attention_flops(1, 8192) * (0.5 + 0.5 / 8)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantization_config"),
    ],
)
def test_a_config_that_says_too_little(change: dict[str, object], field: str) -> None:
    with pytest.raises(FleetError) as caught:
        model.parse({**CONFIG, **change})
    assert caught.value.field == field


def test_every_chip_is_one_or_says_what_is_missing() -> None:
    known = {}
    for name in catalogue.sheets():
        with contextlib.suppress(FleetError):
            known[name] = catalogue.chip(name)
    assert len(known) >= 8
    for chip in known.values():
        assert chip.bandwidth > 1e11
        assert chip.source
    for name in catalogue.sheets().keys() - known.keys():
        with pytest.raises(FleetError) as caught:
            catalogue.chip(name)
        assert caught.value.field in ("tflops", "memory_gb", "memory_gb_per_s")


def test_a_wish_is_not_a_bandwidth() -> None:
    """590 GB/s were measured where 1,600 are quoted."""
    assert catalogue.chip("Iluvatar BI-V150 (Tiangai 150)").bandwidth == 590e9


def test_what_cannot_be_is_dropped_and_nothing_else() -> None:
    models = catalogue.known_models()
    rows = importers.splitwise(DATA / "splitwise" / "perf_model.csv.gz")
    chips = {row.chip: catalogue.chip(row.chip) for row in rows}
    kept, rejected = table.possible(rows, models, chips, "float16")
    assert len(rows) == 2 * 1260
    assert len(kept) + len(rejected) == len(rows)
    gone = [row for row in rows if row not in kept]
    assert {(row.phase, row.requests, row.tp) for row in gone} == {("prefill", 64, 2)}


def test_a_table_reads_what_it_writes() -> None:
    rows = importers.splitwise(DATA / "splitwise" / "perf_model.csv.gz")[:20]
    again = list(table.parse(table.write(rows), "again"))
    assert [(r.sizes, r.seconds, r.source) for r in again] == [(r.sizes, r.seconds, r.source) for r in rows]


def rates(rows: list[Measurement]) -> Rates:
    chip = catalogue.chip("NVIDIA H100 SXM")
    return Rates(model.parse(CONFIG, "m"), chip, 1, "bfloat16", roofline.usual(chip), rows)


def measured(tokens: int, seconds: float, requests: int = 1) -> Measurement:
    return Measurement(
        chip="NVIDIA H100 SXM", model="m", tp=1, phase="prefill", requests=requests, tokens=tokens, context=0.0,
        seconds=seconds, source="me",
    )  # fmt: skip


def test_a_measured_point_is_what_was_measured() -> None:
    found = rates([measured(1000, 0.1), measured(1000, 0.11), measured(2000, 0.2), measured(4000, 0.41)])
    assert found.prefill(1000).seconds == pytest.approx(0.105)
    assert found.prefill(1000).kind == "measured"
    between = found.prefill(1500)
    assert between.kind == "interpolated"
    assert 0.14 < between.seconds < 0.17
    assert found.prefill(100_000).error > between.error
    assert found.decode(1, 1000).kind == "datasheet"


def test_nothing_beats_the_roofline() -> None:
    found = rates([measured(1000, 0.1), measured(2000, 0.1), measured(4000, 0.1), measured(8000, 0.55)])
    chip, shape = found.chip, found.model
    for tokens in (10, 5000, 100_000):
        least = roofline.seconds(shape, chip, Step(1, tokens), 1, roofline.IDEAL, "bfloat16")
        assert found.prefill(tokens).seconds >= least * (1 - 1e-9)
    with pytest.raises(RateError):
        check(measured(8000, 0.1), shape, chip, "bfloat16")


def test_a_size_of_group_that_was_not_measured() -> None:
    """Fractions from groups of two and eight chips, for groups of four: better than none, and as wrong as they say."""
    models = catalogue.known_models()
    shape, chip = models["llama2-70b"], catalogue.chip("NVIDIA A100 SXM 80GB")
    rows = importers.splitwise(DATA / "splitwise" / "perf_model.csv.gz")
    rows = [row for row in rows if (row.chip, row.model) == (chip.name, shape.name)]
    kept, _ = table.possible(rows, models, {chip.name: chip}, "float16")
    fitted = calibrate.fitted([row for row in kept if row.tp != 4], shape, chip, "float16")
    assert fitted is not None
    assert calibrate.fitted(kept[:3], shape, chip, "float16") is None
    wanted = [row for row in kept if row.tp == 4]

    def off(fractions: roofline.Fractions) -> list[float]:
        return [
            abs(math.log(roofline.seconds(shape, chip, row.step, 4, fractions, "float16") / row.seconds))
            for row in wanted
        ]

    assert sum(off(fitted)) < sum(off(roofline.usual(chip)))
    assert sum(one <= math.log1p(fitted.error) for one in off(fitted)) >= 0.9 * len(wanted)


def test_a_surface_follows_a_law() -> None:
    points = [(n, s) for n in (1, 4, 16) for s in (100, 1000, 10000)]
    logs = [math.log(0.01 * n**0.5 * s**0.25) for n, s in points]
    found = surface.fit(points, logs, [0.0] * len(points))
    value, deviation = found.at((8, 3000), 0.0)
    assert math.exp(value) == pytest.approx(0.01 * 8**0.5 * 3000**0.25, rel=0.05)
    assert deviation < found.at((8000, 3), 0.0)[1]

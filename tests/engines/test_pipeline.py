"""An engine whose layers are spread over a pipeline, and others: without one, of unlike ranks, of other versions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet import DEFAULT, Fleet, Running, completion, exact, hand_over, prompt, quiet, token_ids
from matrix import Matrix

pytestmark = pytest.mark.long

LENGTHS = (5, 64, 129, 333, 900)
TOKENS = 64
PIPELINE = ("--pipeline-parallel-size", "2", "--no-enforce-eager")
TWO_RANKS = ("--tensor-parallel-size", "2")
NOT_COMPILED = {"VLLM_USE_AOT_COMPILE": "0"}
"""vLLM's pipeline needs its warm-up, which eager mode leaves out. No test here depends on what is compiled, so nothing
is, which saves minutes."""

OTHERS = {
    "pp1": ((), DEFAULT),
    "tp2": (TWO_RANKS, DEFAULT),
    "pp2-0.27": (PIPELINE, "0.27.1"),
    "pp2-0.29": (PIPELINE, "0.29.0"),
    "tp2-pp2": ((*TWO_RANKS, *PIPELINE), DEFAULT),
}


@pytest.fixture(scope="module")
def pipeline(fleet: Fleet) -> Iterator[Running]:
    """Of two parts, with short steps, so that a long prompt has several under way at once, and few blocks."""
    flags = (*PIPELINE, "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "24")
    model = fleet.tiny("four-heads")
    made = fleet.prepare(
        "pipeline", "both", worker=True, model=model, block_size=64, kv_mib=64, flags=flags, env=NOT_COMPILED
    )
    with fleet.running(made):
        yield made


@pytest.fixture(scope="module", params=list(OTHERS))
def other(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Running]:
    flags, version = OTHERS[str(request.param)]
    made = fleet.prepare(
        f"other-{request.param}",
        "both",
        worker=True,
        version=version,
        model=fleet.tiny("four-heads"),
        block_size=128,
        kv_mib=64,
        flags=flags,
        env=NOT_COMPILED,
    )
    with fleet.running(made):
        yield made


@pytest.mark.parametrize("tokens", LENGTHS)
def test_from_a_pipeline(pipeline: Running, other: Running, matrix: Matrix, tokens: int) -> None:
    assert [(rank.pp, rank.layers) for rank in pipeline.contract.ranks] == [(0, (0, 2)), (1, (2, 4))]
    exact(pipeline, other, tokens, seed=80_000 + tokens, answer=TOKENS)
    matrix.record(pipeline.contract, other.contract, "exact")


@pytest.mark.parametrize("tokens", LENGTHS)
def test_to_a_pipeline(pipeline: Running, other: Running, matrix: Matrix, tokens: int) -> None:
    exact(other, pipeline, tokens, seed=90_000 + tokens, answer=TOKENS)
    matrix.record(other.contract, pipeline.contract, "exact")


@pytest.mark.parametrize("other", ["pp1"], indirect=True)
def test_several_at_a_time(pipeline: Running, other: Running) -> None:
    """Both ways at once. All their blocks do not fit, so requests wait for each other and are preempted."""
    preempted = pipeline.metric("vllm:num_preemptions_total")
    bodies = [completion(prompt(200 + 60 * index, seed=95_000 + index), TOKENS) for index in range(10)]
    ways = [(pipeline, other), (other, pipeline)] * 5
    with ThreadPoolExecutor(len(ways)) as pool:
        answers = list(pool.map(lambda way, body: hand_over(*way, body)[0], ways, bodies))
    quiet(pipeline, other)
    for (_, decode), body, answer in zip(ways, bodies, answers, strict=True):
        assert token_ids(answer) == token_ids(decode.alone(body))
    assert pipeline.metric("vllm:num_preemptions_total") > preempted


def test_sliding_windows_in_a_pipeline(fleet: Fleet, matrix: Matrix) -> None:
    """Both parts have layers of each of the cache's groups."""
    more = {"worker": True, "model": fleet.tiny("hybrid"), "kv_mib": 64, "env": NOT_COMPILED}
    two = fleet.prepare("hybrid-pipeline", "both", block_size=64, flags=PIPELINE, **more)
    one = fleet.prepare("hybrid-whole", "both", block_size=128, **more)
    with fleet.running(two, one):
        assert {group.kind for group in two.contract.groups} == {"sliding", "full"}
        for prefill, decode in ((two, one), (one, two)):
            for tokens in LENGTHS:
                exact(prefill, decode, tokens, seed=97_000 + tokens + 1000 * (decode is two), answer=TOKENS)
            matrix.record(prefill.contract, decode.contract, "exact")

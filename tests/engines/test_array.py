"""Prefill by decode over packing and element type, block size, version of vLLM and ranks: a pairwise covering array.

Every two values of every two of these eight factors meet in one of its pairs of real engines; what the others have in
common with them byte for byte is test_golden's. Twelve engines are enough: any two factors of one engine meet in them.
Those of two ranks need five rows more. A few engines are kept running, for the rows come in an order in which they are
soon used again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import VERSIONS, Fleet, Running, completion, hand_over, http, prompt, quiet, token_ids
from matrix import Matrix
from pairwise import covered, rows, sharing

from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate

PACKINGS = ("float32 vec", "float16 vec", "bfloat16 vec", "bfloat16 amx")
BLOCKS = (32, 64, 128)
RANKS = (1, 2)
LENGTHS = (5, 17, 64, 129, 200, 333, 500, 900)
FORCED = (200, 500, 900)
"""The prompts after which 64 tokens are forced on a 16-bit engine: each is more than one chunk of 128."""

TOKENS, CHUNK = 64, 128
DRIFT = 0.25
"""How far the log-probability of the first new token may move when the cache comes from fewer bits."""

KEPT = 4
Kind = tuple[str, int, str]
Side = tuple[str, int, str, int]
"""A kind of engine, and one with its number of ranks."""

KINDS: list[Kind] = [
    (packing, block, VERSIONS[(i + j) % len(VERSIONS)])
    for i, packing in enumerate(PACKINGS)
    for j, block in enumerate(BLOCKS)
]


def two_ranks(a: Kind, b: Kind, c: Kind, d: Kind) -> list[tuple[Side, Side]]:
    """Rows with two ranks on either side and on both, from one engine of each packing.

    Chosen so that each value stands beside two ranks on its own side and opposite to them, which a test below proves.
    """
    a2, b2, c2, d2 = ((*kind, 2) for kind in (a, b, c, d))
    return [(a2, (*b, 1)), (b2, c2), (c2, d2), (d2, a2), ((*a, 1), b2)]


ROWS: list[tuple[Side, Side]] = [((*one, 1), (*other, 1)) for one, other in sharing(rows(KINDS), KEPT)]
ROWS += two_ranks(KINDS[0], KINDS[4], KINDS[8], KINDS[9])


class Stage:
    """The engines that are running, those used last at the end."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._running: dict[Side, Running] = {}
        consent = fleet.folder / "all-casts.toml"
        consent.write_text('[kv]\ncasts = ["*->float16", "*->bfloat16"]\n')
        self._config = consent
        self._model = fleet.tiny("four-heads")

    def of(self, *sides: Side) -> list[Running]:
        for side in sides:
            if side in self._running:
                self._running[side] = self._running.pop(side)
        missing = {side: self._prepare(side) for side in sides if side not in self._running}
        while len(self._running) + len(missing) > KEPT:
            self._running.pop(next(iter(self._running))).process.stop()
        self._running |= missing
        self._fleet.start(*missing.values())
        return [self._running[side] for side in sides]

    def close(self) -> None:
        for running in self._running.values():
            running.process.stop()

    def _prepare(self, side: Side) -> Running:
        packing, block, version, ranks = side
        dtype, _, isa = packing.partition(" ")
        env = {"DEEPLINK_TESTING_ISA": isa} if dtype == "bfloat16" else {}
        settings = {"block_size": block, "version": version, "dtype": dtype, "env": env, "kv_mib": 48}
        if ranks > 1:
            settings["flags"] = ("--tensor-parallel-size", str(ranks))
        name = "-".join(map(str, side)).replace(" ", "-")
        return self._fleet.prepare(name, "both", model=self._model, config=self._config, **settings)


@pytest.fixture(scope="module")
def stage(fleet: Fleet) -> Iterator[Stage]:
    made = Stage(fleet)
    yield made
    made.close()


def test_the_array_covers_every_two_values() -> None:
    wanted: set[Any] = set()
    for a, b in itertools.product(itertools.product(PACKINGS, BLOCKS, VERSIONS, RANKS), repeat=2):
        wanted |= covered(a, b)
    assert wanted == set().union(*(covered(*row) for row in ROWS))
    assert len(ROWS) <= 24
    assert len({side for row in ROWS for side in row if side[3] == 1}) == len(KINDS)


@pytest.mark.long
@pytest.mark.parametrize("at", range(len(ROWS)), ids=lambda at: f"row{at:02}")
def test_pair(stage: Stage, matrix: Matrix, at: int) -> None:
    prefill, decode = stage.of(*ROWS[at])
    ours, theirs = prefill.contract, decode.contract
    agreement = negotiate(ours, theirs)
    assert isinstance(agreement, Agreement)
    dtypes = ours.groups[0].dtype, theirs.groups[0].dtype
    if dtypes == ("float32", "float32"):
        for tokens in LENGTHS:
            _check_tokens(prefill, decode, prompt(tokens, seed=9000 + 20 * at + tokens))
        result = "exact"
    elif dtypes[0] == dtypes[1]:
        _check_log_probabilities(prefill, decode, 9000 + 20 * at)
        result = "exact"
    else:
        for tokens in LENGTHS:
            _check_drift(prefill, decode, prompt(tokens, seed=9000 + 20 * at + tokens))
        result = "exact (bytes)" if agreement.exact else f"lossy ({agreement.casts[0].name})"
    assert agreement.exact == result.startswith("exact")
    matrix.record(ours, theirs, result)


def _handed_over(prefill: Running, decode: Running, body: dict[str, Any]) -> Any:
    """The answer, of which all but the last prompt token was handed over, with every byte of it verified."""
    before = decode.loaded_tokens
    answer, name = hand_over(prefill, decode, body)
    assert decode.loaded_tokens - before == len(body["prompt"]) - 1
    quiet(prefill, decode)
    ours, theirs = prefill.handoff(name), decode.handoff(name)
    assert (ours["state"], theirs["state"]) == ("drained", "loaded")
    assert ours["digest"] == theirs["digest"] != ""
    return answer


def _check_tokens(prefill: Running, decode: Running, words: list[int]) -> None:
    body = completion(words, TOKENS)
    assert token_ids(_handed_over(prefill, decode, body)) == token_ids(decode.alone(body))


def _check_drift(prefill: Running, decode: Running, words: list[int]) -> None:
    """What the prefill engine computed in its own type is not what the decode engine would have."""
    body = completion(words, 1, logprobs=1)
    answer, alone = _handed_over(prefill, decode, body), decode.alone(body)
    assert abs(_log_probability(answer) - _log_probability(alone)) < DRIFT


def _check_log_probabilities(prefill: Running, decode: Running, seed: int) -> None:
    """Over 64 forced tokens, what was handed over is at most twice as far from the engine's own as that is from itself,
    computed in chunks of another size."""
    apart, own = 0.0, 0.0
    for tokens in LENGTHS:
        words = prompt(tokens, seed=seed + tokens)
        salts = [f"{kind}-{seed}-{tokens}" for kind in ("handed", "whole", "chunks")]
        body = completion(words, TOKENS, cache_salt=salts[0])
        forced = token_ids(_handed_over(prefill, decode, body))
        if tokens not in FORCED:
            continue
        for end in range(CHUNK, tokens, CHUNK):  # in chunks of 128: each request computes what the one before has not
            _ask(decode, completion(words[:end], 1, cache_salt=salts[2]))
        handed, whole, chunks = (_forced(decode, words, forced, salt) for salt in salts)
        apart = max(apart, *(abs(a - b) for a, b in zip(handed, whole, strict=True)))
        own = max(own, *(abs(a - b) for a, b in zip(chunks, whole, strict=True)))
    assert apart <= 2 * own, (apart, own)


def _forced(engine: Running, words: list[int], forced: list[int], salt: str) -> list[float]:
    """The log-probability of each of the forced tokens after the ones before. The cache under `salt` is used."""
    found = []
    for at, token in enumerate(forced):
        body = completion(words + forced[:at], 1, cache_salt=salt, allowed_token_ids=[token], logprobs=1)
        found.append(_log_probability(_ask(engine, body)))
    return found


def _ask(engine: Running, body: dict[str, Any]) -> Any:
    answer = http(engine.url + "/v1/completions", body)
    assert answer.status == 200, answer.data
    return answer.json


def _log_probability(answer: Any) -> float:
    value: float = answer["choices"][0]["logprobs"]["token_logprobs"][0]
    return value

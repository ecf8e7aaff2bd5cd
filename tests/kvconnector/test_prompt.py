"""Two engines share a prompt's digest only for the same prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deeplink.kvconnector.prompt import DIGEST_BYTES, prompt_digest

TOKENS = st.lists(st.integers(0, 1 << 31), max_size=20)
EXTRA = st.lists(st.text(max_size=8), max_size=4)


@given(TOKENS, EXTRA, TOKENS, EXTRA)
def test_equal_exactly_when_the_prompt_is(a: list[int], more_a: list[str], b: list[int], more_b: list[str]) -> None:
    equal = prompt_digest(a, more_a) == prompt_digest(b, more_b)
    assert equal == ((a, more_a) == (b, more_b))


@given(TOKENS, EXTRA)
def test_the_kind_of_sequence_does_not_enter(tokens: list[int], extra: list[str]) -> None:
    digest = prompt_digest(tokens, extra)
    assert len(digest) == DIGEST_BYTES
    assert digest == prompt_digest(tuple(tokens), iter(extra)) == prompt_digest(np.array(tokens, np.int64), extra)


def test_neighbours_differ() -> None:
    digests = [
        prompt_digest([]),
        prompt_digest([0]),
        prompt_digest([0, 0]),
        prompt_digest([1, 2]),
        prompt_digest([2, 1]),
        prompt_digest([1], [""]),
        prompt_digest([1], ["", ""]),
        prompt_digest([1], ["ab"]),
        prompt_digest([1], ["a", "b"]),
        prompt_digest([1], ["lora=x"]),
        prompt_digest([1], ["salt=x"]),
    ]
    assert len(set(digests)) == len(digests)


def test_pinned() -> None:
    """Both engines compute it, so it may not change within a wire version."""
    assert prompt_digest([1, 2, 3], ["salt=x"]).hex() == "806f7fcc9d59dca67834cb43f4bc4c4f"


def test_a_client_may_choose_any_salt() -> None:
    assert prompt_digest([1], ["salt=\ud800"]) != prompt_digest([1], ["salt=\ud801"])

"""Two engines share a prompt's digest only for the same prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import Refused
from deeplink.kvconnector.prompt import DIGEST_BYTES, KEYS, check_same, identity, prompt_digest

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


# -- identities ----------------------------------------------------------------------------------------------

GIVEN = st.dictionaries(st.sampled_from(list(KEYS)), st.text(max_size=3))


@given(TOKENS, GIVEN, TOKENS, GIVEN)
def test_an_identity_tells_what_differs(a: list[int], has: dict[str, str], b: list[int], other: dict[str, str]) -> None:
    ours, theirs = identity(a, has), identity(b, other)
    assert len(ours) <= 64  # what a claim may carry
    differing = [name for name in KEYS if has.get(name) != other.get(name)]
    if a == b and not differing:
        check_same(ours, theirs)
        return
    with pytest.raises(Refused) as caught:
        check_same(ours, theirs)
    assert caught.value.field == ("prompt" if a != b else differing[0])
    assert caught.value.ours != caught.value.theirs
    assert caught.value.remedy


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_whatever_a_peer_claims(ours: bytes, theirs: bytes) -> None:
    if ours == theirs:
        check_same(ours, theirs)
        return
    with pytest.raises(Refused):
        check_same(ours, theirs)


def test_identity_is_pinned() -> None:
    pinned = "4dfd4e51f6116414449b4f5e20e48f99", "4adf4367f96e584f", "e4a6a0577479b2b4", "0000000000000000"
    assert identity([1, 2, 3], {"cache_salt": "x", "lora": ""}).hex() == "".join(pinned)

"""Two engines share a prompt's digest only for the same prompt, and learn what differs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.errors import Refused
from deeplink.kvconnector.contracts.prompt import DIGEST_BYTES, KEYS, OTHER, check_same, prompt_digest

TOKENS = st.lists(st.integers(0, 1 << 31), max_size=20)
NAMES = [*KEYS, "other"]
EXTRA = st.lists(st.builds("{}={}".format, st.sampled_from(NAMES), st.text(max_size=4)), max_size=4)


def grouped(extra: list[str]) -> dict[str, list[str]]:
    return {name: [text for text in extra if text.partition("=")[0] == name] for name in NAMES}


@given(TOKENS, EXTRA, TOKENS, EXTRA)
def test_equal_exactly_when_the_prompt_is(a: list[int], more_a: list[str], b: list[int], more_b: list[str]) -> None:
    """Else the refusal names what differs, tokens first."""
    ours, theirs = prompt_digest(a, more_a), prompt_digest(b, more_b)
    differing = [name for name in NAMES if grouped(more_a)[name] != grouped(more_b)[name]]
    if a == b and not differing:
        assert ours == theirs
        check_same(ours, theirs)
        return
    with pytest.raises(Refused) as caught:
        check_same(ours, theirs)
    fields = {name: key.field for name, key in KEYS.items()} | {"other": OTHER.field}
    assert caught.value.field == ("prompt" if a != b else fields[differing[0]])
    assert caught.value.ours != caught.value.theirs
    assert caught.value.remedy


@given(TOKENS, EXTRA)
def test_the_kind_of_sequence_does_not_enter(tokens: list[int], extra: list[str]) -> None:
    digest = prompt_digest(tokens, extra)
    assert len(digest) == DIGEST_BYTES <= 64  # what a claim may carry
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
        prompt_digest([1], ["salt="]),
        prompt_digest([1], ["media=x"]),
        prompt_digest([1], ["media=x", "media=x"]),
    ]
    assert len(set(digests)) == len(digests)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_whatever_a_peer_claims(ours: bytes, theirs: bytes) -> None:
    check_same(ours, ours)
    if ours != theirs:
        with pytest.raises(Refused) as caught:
            check_same(ours, theirs)
        assert caught.value.field == "prompt" or len(ours) == len(theirs) == DIGEST_BYTES


def test_pinned() -> None:
    """Both engines compute it, so it may not change within a wire version."""
    pinned = (
        "4dfd4e51f6116414449b4f5e20e48f99",
        "3aa5cd96eb5ba454",
        "0000000000000000",
        "0000000000000000",
        "53ee740ed9022b3a",
    )
    assert prompt_digest([1, 2, 3], ["salt=x", "engine=y"]).hex() == "".join(pinned)


def test_a_client_may_choose_any_salt() -> None:
    assert prompt_digest([1], ["salt=\ud800"]) != prompt_digest([1], ["salt=\ud801"])

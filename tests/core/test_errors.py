"""The error tree: as drawn, with codes that mean one thing, and whole again after a journey."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink import errors
from deeplink.errors import DeeplinkError, HandoffError, Reason


def kinds(kind: type[DeeplinkError] = DeeplinkError) -> Iterator[type[DeeplinkError]]:
    yield kind
    for sub in kind.__subclasses__():
        if sub.__module__ == errors.__name__:
            yield from kinds(sub)


ALL = list(kinds())


def drawn() -> dict[str, str]:
    """Name -> parent, as the docstring draws it."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:│   |    )*)(?:├── |└── )?([A-Z]\w+)", line)
        if match is None:
            continue
        branch = "── " in line
        depth = len(match[1]) // 4 + branch
        del path[depth:]
        if path:
            parents[match[2]] = path[-1]
        path.append(match[2])
    return parents


def test_the_tree_is_the_one_that_is_drawn() -> None:
    assert drawn() == {kind.__name__: kind.__base__.__name__ for kind in ALL if kind is not DeeplinkError}


def test_codes_are_unique_and_plain() -> None:
    codes = [kind.code for kind in ALL]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)
    assert all("code" in vars(kind) for kind in ALL)  # none is inherited by accident


@pytest.mark.parametrize("kind", ALL)
def test_a_status_is_one_of_an_error(kind: type[DeeplinkError]) -> None:
    assert 400 <= kind.status < 600


TEXT = st.text(max_size=20)


@given(st.sampled_from(ALL), TEXT, TEXT, TEXT, TEXT, TEXT)
def test_there_and_back(
    kind: type[DeeplinkError], message: str, field: str, ours: str, theirs: str, remedy: str
) -> None:
    error = kind(message, field=field, ours=ours, theirs=theirs, remedy=remedy)
    sent = msgspec.msgpack.encode(error.reason())
    again = DeeplinkError.from_reason(msgspec.msgpack.decode(sent, type=Reason))
    assert type(again) is kind
    assert again.reason() == error.reason()
    assert (again.message, again.field, again.ours, again.theirs, again.remedy) == (
        message,
        field,
        ours,
        theirs,
        remedy,
    )
    assert str(again) == str(error)


def test_a_code_of_a_later_release() -> None:
    again = DeeplinkError.from_reason(Reason("not_invented_yet", "message", "field"))
    assert type(again) is HandoffError
    assert (again.message, again.field) == ("message", "field")


def test_the_text_says_everything() -> None:
    error = HandoffError("what failed", field="which.field", ours="1", theirs="2", remedy="do this")
    assert str(error) == "what failed; field which.field: ours 1, theirs 2; do this"
    assert str(HandoffError("what failed", field="f")) == "what failed; field f: ours -, theirs -"
    assert str(HandoffError("what failed")) == "what failed"


def test_only_what_is_set_travels() -> None:
    assert msgspec.json.encode(HandoffError("x").reason()) == b'{"code":"handoff_failed","message":"x"}'

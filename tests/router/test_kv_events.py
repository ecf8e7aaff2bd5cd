"""Cache events of engines, in both encodings, and what is no such thing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deeplink.errors import ProtocolError
from deeplink.router import kv_events
from deeplink.router.kv_events import Cleared, Removed, Stored

from .kv_publisher import batch, cleared, removed, stored


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("hashes", [[7, 1 << 63], [b"a" * 32, b"b" * 32]])
def test_both_encodings_say_the_same(array: bool, hashes: list[Any]) -> None:
    tokens = list(range(8))
    found = kv_events.decode(
        batch(stored(hashes, tokens, hashes[0], array=array), removed(hashes[:1], array=array), cleared(array=array))
    )
    assert found == [
        Stored(tuple(hashes), hashes[0], tuple(tokens), 4, keyed=False),
        Removed((hashes[0],)),
        Cleared(),
    ]


@pytest.mark.parametrize(
    "more", [{"lora_name": "a"}, {"lora_id": 1}, {"extra_keys": [None, ["salt"]]}], ids=["lora", "id", "extra"]
)
def test_blocks_of_more_than_tokens_are_marked(more: dict[str, Any]) -> None:
    (found,) = kv_events.decode(batch(stored([1, 2], list(range(8)), **more)))
    assert isinstance(found, Stored)
    assert found.keyed


def test_other_memories_groups_kinds_and_members_are_left_out() -> None:
    events = [
        stored([1], [0, 1, 2, 3], medium="CPU"),
        removed([1], medium="STORAGE"),
        stored([1], [0, 1, 2, 3], group_idx=1),
        {"type": "SomethingNew", "of": "tomorrow"},
        stored([2], [0, 1, 2, 3], medium=None, new_member={"a": 1}),
    ]
    assert [type(event) for event in kv_events.decode(batch(*events))] == [Stored]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 5]),
        batch(5),
        batch([]),
        batch(stored("no", [])),
        batch(stored([1.5], [0, 1, 2, 3])),
        batch(stored([b"x" * 65], [0, 1, 2, 3])),
        batch(stored([True], [0, 1, 2, 3])),
        batch(stored([1], [0, 1, 2])),
        batch(stored([1], [0, 1, 2, -1])),
        batch(stored([1], [0, 1, 2, 1 << 32])),
        batch(stored([1], [0], size=0)),
        batch(stored([1], [], size=1 << 40)),
        batch(stored([1], [0, 1, 2, 3], parent=[1])),
        b"\x91" * 5000,
    ],
)
def test_what_is_no_batch_is_named_as_such(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        kv_events.decode(data)


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BATCH", 100)
    monkeypatch.setattr(kv_events, "MAX_EVENTS", 2)
    for data in (batch(stored(list(range(100)), list(range(400)))), batch(cleared(), cleared(), cleared())):
        with pytest.raises(ProtocolError):
            kv_events.decode(data)

"""The contract's wire form: round trip, version first, nothing but its own errors for anything else."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import VEC, make_contract, make_group

from deeplink.errors import ProtocolError, Refused
from deeplink.kvconnector.contracts import contract as co

CONTRACT = make_contract("epoch", "prefill", make_group(VEC, 64), channel="127.0.0.1:1", tcp="127.0.0.1:2")


def test_round_trip() -> None:
    assert co.decode(co.encode(CONTRACT)) == CONTRACT


def test_json_is_for_people_and_complete() -> None:
    text = co.to_json(CONTRACT)
    assert msgspec.json.decode(text, type=co.Contract) == CONTRACT
    assert json.loads(text)["groups"][0]["layout"] == VEC


@pytest.mark.parametrize("body", [b"\x80", b"\xc0", b"\xa3abc", msgspec.msgpack.encode({"later": [1, 2, {"x": None}]})])
def test_another_version_is_refused_before_its_body_is_read(body: bytes) -> None:
    data = msgspec.msgpack.encode((co.WIRE_VERSION + 1, msgspec.Raw(body)))
    with pytest.raises(Refused) as caught:
        co.decode(data)
    error = caught.value
    assert (error.field, error.ours, error.theirs) == ("wire_version", str(co.WIRE_VERSION), str(co.WIRE_VERSION + 1))
    assert "same deeplink release" in error.remedy


def test_the_same_version_with_another_body_is_malformed() -> None:
    with pytest.raises(ProtocolError, match="body is malformed"):
        co.decode(msgspec.msgpack.encode((co.WIRE_VERSION, {"engine": "vllm"})))


def test_too_large() -> None:
    data = co.encode(msgspec.structs.replace(CONTRACT, casts=tuple("x" * 256 for _ in range(64))))
    assert co.decode(data).casts[0] == "x" * 256
    with pytest.raises(ProtocolError) as caught:
        co.decode(data + bytes(co.MAX_BYTES - len(data) + 1))
    assert caught.value.field == "length"


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "x" * 257},
        {"groups": ()},
        {"ranks": ()},
        {"casts": ("x",) * 65},
        {"groups": (msgspec.structs.replace(CONTRACT.groups[0], heads=0),)},
        {"groups": (msgspec.structs.replace(CONTRACT.groups[0], block_size=1 << 40),)},
        {"groups": (msgspec.structs.replace(CONTRACT.groups[0], layout="x" * 5000),)},
        {"ranks": (msgspec.structs.replace(CONTRACT.ranks[0], tp=-1),)},
        {"ranks": (msgspec.structs.replace(CONTRACT.ranks[0], transports={str(i): "" for i in range(17)}),)},
    ],
)
def test_limits(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        co.decode(co.encode(msgspec.structs.replace(CONTRACT, **change)))


def decodes_or_refuses(data: bytes) -> None:
    try:
        decoded = co.decode(data)
    except (ProtocolError, Refused):
        return
    assert co.decode(co.encode(decoded)) == decoded


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    decodes_or_refuses(data)
    decodes_or_refuses(b"\x92\x01" + data)


@given(st.data())
def test_mutated_bytes(data: st.DataObject) -> None:
    good = bytearray(co.encode(CONTRACT))
    for _ in range(data.draw(st.integers(1, 8))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(good))


@given(st.integers(0, 10_000), st.binary(max_size=8))
def test_cut_off_or_prolonged(length: int, tail: bytes) -> None:
    good = co.encode(CONTRACT)
    decodes_or_refuses(good[: length % len(good)] + tail)
    if tail:
        with pytest.raises(ProtocolError):
            co.decode(good + tail)


@pytest.mark.parametrize("unit", [b"\x91", b"\x92\x01", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_nesting_and_absurd_lengths(unit: bytes) -> None:
    decodes_or_refuses(unit * (co.MAX_BYTES // len(unit)))
    decodes_or_refuses(b"\x92\x01" + unit * 50_000)


def test_json_comes_back() -> None:
    assert co.from_json(co.to_json(CONTRACT)) == CONTRACT
    assert co.from_json(msgspec.json.encode(CONTRACT)) == CONTRACT


def test_json_of_the_largest_contract_that_is_served_can_be_read() -> None:
    group = msgspec.structs.replace(CONTRACT.groups[0], layers=tuple(range(100, 128)) * 146)
    contract = msgspec.structs.replace(CONTRACT, groups=(group,) * 60, casts=("\x01" * 256,) * 32)
    assert co.MAX_BYTES * 0.9 < len(co.encode(contract)) <= co.MAX_BYTES
    assert co.from_json(co.to_json(contract)) == contract


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ((), "block_size"),
        (("model",), "model.weight"),
        (("groups", 0), "groups[0].block"),
        (("ranks", 0), "ranks[0].port"),
    ],
)
def test_json_with_a_field_no_contract_has(path: tuple[str | int, ...], name: str) -> None:
    value = json.loads(co.to_json(CONTRACT))
    inner = value
    for step in path:
        inner = inner[step]
    inner[name.rpartition(".")[2]] = 1
    with pytest.raises(ProtocolError, match=re.escape(f"no field {name}")):
        co.from_json(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "layers"), "3"),
        (("model", "layers"), 3.0),
        (("model", "layers"), True),
        (("model", "layers"), 0),
        (("engine",), None),
        (("engine",), "x" * 257),
        (("groups",), []),
        (("ranks", 0, "heads"), [0]),
        (("groups", 0, "layers"), ["0"]),
        (("ranks", 0, "transports"), [["tcp", ""]]),
    ],
)
def test_json_is_strict(path: tuple[str | int, ...], value: object) -> None:
    whole = inner = json.loads(co.to_json(CONTRACT))
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(ProtocolError, match="not a contract"):
        co.from_json(json.dumps(whole).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"{" * 100_000, b"[" * 100_000, b'{"engine": "\xff\xfe"}', b'{"engine": "\\ud800"}'],
)
def test_not_json_of_a_contract(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a contract"):
        co.from_json(data)


def test_json_that_nests_deep_where_anything_may_stand() -> None:
    data = co.to_json(CONTRACT)[:-2] + b', "extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ProtocolError, match="not a contract"):
        co.from_json(data)


def test_json_that_is_too_large() -> None:
    data = co.to_json(CONTRACT)
    assert co.from_json(data + b" " * (co.MAX_JSON_BYTES - len(data))) == CONTRACT
    with pytest.raises(ProtocolError) as caught:
        co.from_json(data + b" " * (co.MAX_JSON_BYTES - len(data) + 1))
    assert caught.value.field == "length"


@given(st.binary(max_size=300) | st.integers(0, 5000).map(lambda at: co.to_json(CONTRACT)[:at]))
def test_any_bytes_as_json(data: bytes) -> None:
    try:
        contract = co.from_json(data)
    except ProtocolError:
        return
    assert contract == CONTRACT


@pytest.mark.parametrize(
    ("address", "where"),
    [
        (co.local_address("boot.1", "name"), "boot.1"),
        (co.local_address("boot.1", "a/b"), "boot.1"),
        ("127.0.0.1:80", ""),
        ("[::1]:80", ""),
        ("local:80", ""),
        ("tcp://local:80/", ""),
        ("", ""),
    ],
)
def test_the_place_of_an_address(address: str, where: str) -> None:
    assert co.place(address) == where


def test_the_order_of_the_transports_survives() -> None:
    rank = msgspec.structs.replace(CONTRACT.ranks[0], transports={"z": "", "a": "", "m": ""})
    decoded = co.decode(co.encode(msgspec.structs.replace(CONTRACT, ranks=(rank,))))
    assert list(decoded.ranks[0].transports) == ["z", "a", "m"]

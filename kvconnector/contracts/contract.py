"""What one engine states about itself, and how that statement travels.

On the wire a contract is msgpack in two phases: an outer pair ``[wire_version, body]`` that every release can
read, and a body that is decoded only when the version is known. To people it is JSON (`to_json`).

Engine name, engine version and chip are carried to be read, not compared: what decides whether two engines
can hand over is what their bytes mean, and that is in the other fields.

Wire versions:

1.  First. Model identity with weights fingerprint, cache groups with layout text, ranks with addresses.
2.  A rank states its layers, and its heads for each cache group, so that engines split differently can hand over; a
    group states its window and its scales, without which an 8-bit cache or a sliding one has no meaning. `alone` was
    added later: it changes nothing about what may be handed over, and a reader that does not know it loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from deeplink.errors import ProtocolError, Refused

WIRE_VERSION = 2
MAX_BYTES = 256 << 10
MAX_JSON_BYTES = 16 * MAX_BYTES
"""Indented, a layer's number takes a line of 13 bytes where msgpack takes one; nothing grows more than that."""

MAX_NAME = 256
SHOWN = 8
"""Of many scales, how many people see."""

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Scale = Annotated[float, msgspec.Meta(gt=0, lt=2.0**128)]
"""What a float32 can hold; never NaN, which is not equal to itself and has no JSON."""


class Model(msgspec.Struct, frozen=True):
    """Which function of the tokens the cache holds. Two models are one only if every field is equal.

    `rope` is the canonical JSON of the position encoding (it is already applied to the cached K); `weights` is
    the fingerprint of `deeplink.kvconnector.contracts.weights`.
    """

    architecture: Name
    layers: Size
    vocabulary: Size
    rope: Text
    quantization: Name
    weights: Name


class Scales(msgspec.Struct, frozen=True):
    """What turns stored elements into values.

    `scheme` is "tensor": value = element * scale, with one constant for K and one for V of each layer (`values`, in
    the order of the group's layers, K before V); or "token-head": one scale for each token, head and K or V, in
    tensors of their own. Those have the layout `layout`, in which dim is 1, and elements of type `dtype`.
    """

    scheme: Name
    values: Annotated[tuple[Scale, ...], msgspec.Meta(max_length=8192)] = ()
    layout: Text = ""
    dtype: Name = "float32"

    def __str__(self) -> str:
        values = [f"{value:g}" for value in self.values[:SHOWN]]
        more = "…" if len(self.values) > SHOWN else ""
        return ", ".join([self.scheme, *values]) + more + (f" {self.dtype} {self.layout}" if self.layout else "")


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table, and what one of their blocks means byte by byte.

    `kind` is "full"; "sliding", where a token sees itself and the `window` - 1 before it, and older ones may be gone;
    or "state", where there is one record per request instead of one vector per token. `heads` counts KV heads over all
    ranks, each once however many ranks hold it; `block_size` is in tokens; `layout` is in the notation of
    `deeplink.kvconnector.layouts.layout`; `dtype` is the element type, not the storage type.
    """

    kind: Name
    layers: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=4096)]
    heads: Size
    head_dim: Size
    dtype: Name
    block_size: Size
    layout: Text
    window: Count = 0
    scales: Scales | None = None


class Rank(msgspec.Struct, frozen=True):
    """One process that holds part of the cache, and where to reach it.

    `heads` are the heads ``[start, stop)`` it holds, for each cache group; `layers` are those ``[start, stop)`` it
    holds, in the numbers that the groups use. `channel` is the ``host:port`` of its handoff channel; `transports` maps
    a transport's name to the address it describes itself with, in order of preference.
    """

    tp: Count
    pp: Count
    dp: Count
    heads: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(min_length=1, max_length=64)]
    layers: tuple[Count, Count]
    channel: Name
    transports: Annotated[dict[Name, Text], msgspec.Meta(max_length=16)]


class Contract(msgspec.Struct, frozen=True):
    """One engine's statement. `epoch` is new at every start; `role` is prefill, decode or both.

    `casts` are the lossy casts its operator consents to, as ``source->target``. `alone` says whether it can do all of a
    request itself, whatever its role.
    """

    engine: Name
    engine_version: Name
    chip: Name
    role: Name
    epoch: Name
    model: Model
    groups: Annotated[tuple[CacheGroup, ...], msgspec.Meta(min_length=1, max_length=64)]
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, max_length=1024)]
    casts: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()
    alone: bool = True

    @property
    def produces(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def consumes(self) -> bool:
        return self.role in ("decode", "both")


def merged(contracts: Sequence[Contract]) -> Contract:
    """One contract for all ranks of an engine, from those of each, in the order in which tickets count them.

    A rank states the layers it holds; the engine has those of all its ranks.
    """
    first = contracts[0]
    groups = zip(*(contract.groups for contract in contracts), strict=True)
    ranks = tuple(rank for contract in contracts for rank in contract.ranks)
    return msgspec.structs.replace(first, groups=tuple(map(_merged_group, groups)), ranks=ranks)


def _merged_group(groups: Sequence[CacheGroup]) -> CacheGroup:
    values: dict[int, tuple[float, ...]] = {}
    for group in groups:
        stated = group.scales.values if group.scales else ()
        values |= {layer: stated[2 * place : 2 * place + 2] for place, layer in enumerate(group.layers)}
    layers = tuple(sorted(values))
    scales = groups[0].scales
    if scales is not None:
        flat = tuple(value for layer in layers for value in values[layer])
        scales = msgspec.structs.replace(scales, values=flat)
    return msgspec.structs.replace(groups[0], layers=layers, scales=scales)


_LOCAL = "local:"


def local_address(where: str, name: str) -> str:
    """The address of a transport that is reached only from the place `where`, such as one host."""
    return f"{_LOCAL}{where}/{name}"


def place(address: str) -> str:
    """The place a transport's address is confined to; empty for one that may be reached from anywhere.

    Two transports of one name reach each other only if their addresses are confined to the same place.
    """
    where, slash, _ = address.removeprefix(_LOCAL).partition("/")
    return where if slash and address.startswith(_LOCAL) else ""


_envelope = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_body = msgspec.msgpack.Decoder(Contract)
_json = msgspec.json.Decoder(Contract)


def encode(contract: Contract) -> bytes:
    return msgspec.msgpack.encode((WIRE_VERSION, msgspec.Raw(msgspec.msgpack.encode(contract))))


def decode(data: bytes) -> Contract:
    """Raises Refused for another wire version, ProtocolError for anything that is not a contract."""
    if len(data) > MAX_BYTES:
        raise ProtocolError(
            "a contract larger than the limit", field="length", ours=str(MAX_BYTES), theirs=str(len(data))
        )
    try:
        version, body = _envelope.decode(data)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a contract: {exc}") from exc
    if version != WIRE_VERSION:
        raise Refused(
            "the peer's contract has another wire version",
            field="wire_version",
            ours=str(WIRE_VERSION),
            theirs=str(version),
            remedy="install the same deeplink release on both sides",
        )
    try:
        return _body.decode(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"the contract's body is malformed: {exc}") from exc


def to_json(contract: Contract) -> bytes:
    return msgspec.json.format(msgspec.json.encode(contract), indent=2)


def from_json(data: bytes) -> Contract:
    """What `to_json` wrote. Raises ProtocolError for anything else.

    JSON is kept in files and edited by hand, so a field that no contract has is an error too: on the wire it may come
    from a later release, here it is a slip that would silently change nothing.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ProtocolError(
            "a contract larger than the limit",
            field="length",
            ours=str(MAX_JSON_BYTES),
            theirs=f"over {MAX_JSON_BYTES}",
        )
    try:
        contract = _json.decode(data)
        for name in _unknown(msgspec.json.decode(data), msgspec.json.decode(msgspec.json.encode(contract))):
            raise ProtocolError(f"not a contract: it has no field {name}")
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a contract: {exc}") from exc
    return contract


def _unknown(given: Any, known: Any, where: str = "") -> Iterator[str]:
    """The fields in `given` that are not in `known`, which is the same value after a round trip."""
    if isinstance(given, dict):
        for name, value in given.items():
            if name in known:
                yield from _unknown(value, known[name], f"{where}{name}.")
            else:
                yield where + name
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from _unknown(value, known[index], f"{where.removesuffix('.')}[{index}].")

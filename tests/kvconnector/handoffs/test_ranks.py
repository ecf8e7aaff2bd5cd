"""Engines of unlike parallel sizes hand over exactly: every byte of every rank is what one rank would have had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import HND, NHD, NZ, SLOTS, VEC, Meddling
from world import Engine, Shape, agree, hand_over, read

from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.contract import CacheGroup
from deeplink.kvconnector.contracts.shares import Needs, held
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.relayout.convert import storage_dtype
from deeplink.kvconnector.relayout.plan import TILE, Chunk, chunks
from deeplink.kvconnector.transport.base import Push

MLA = "block token dim"
CHUNK = 64 << 10
Start = Callable[..., Engine]


def group(layout: str, block_size: int, heads: int, layers: int, dtype: str = "bfloat16", dim: int = 16) -> CacheGroup:
    return CacheGroup("full", tuple(range(layers)), heads, dim, dtype, block_size, layout)


def whole(engine: Engine, index: int, table: list[int], start: int, stop: int) -> np.ndarray:
    """What the engine has of a cache group, put together from its ranks; copies of a head must be equal."""
    spec = engine.contract.groups[index]
    shape = (len(spec.layers), engine.held[0][index].values.bound.kv, spec.heads, stop - start, spec.head_dim)
    out = np.zeros(shape, storage_dtype(spec.dtype))
    seen = np.zeros(shape[:3], bool)
    for groups in engine.held:
        part = groups[index]
        rows = [spec.layers.index(layer) for layer in part.layers]
        place = np.ix_(rows, range(shape[1]), range(*part.heads))
        values = read(groups, index, table, start, stop)
        assert (out[place] == values)[seen[place]].all(), "two copies of one head differ"
        out[place] = values
        seen[place] = True
    assert seen.all()
    return out


def same_heads(engine: Engine) -> None:
    """Give all copies of a head the same bytes, as an engine would."""
    spec = engine.contract.groups[0]
    table = list(range(engine.shape.blocks))
    stop = engine.shape.blocks * spec.block_size
    first: dict[tuple[int, int], np.ndarray] = {}
    for groups in engine.held:
        part = groups[0]
        wire = read(groups, 0, table, 0, stop)
        for row, layer in enumerate(part.layers):
            for column, head in enumerate(range(*part.heads)):
                wire[row, :, column] = first.setdefault((layer, head), wire[row, :, column].copy())
        part.values.scatter(wire, 0, table, Chunk(0, stop))


@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (1, 8), (8, 1), (2, 4), (4, 2), (8, 4), (4, 4)])
def test_tensor_parallel_sizes_may_differ(start: Start, ours: int, theirs: int, heads: int) -> None:
    """Split heads, and with two heads on four or eight ranks copies."""
    a = start(Shape((group(NHD, 16, heads, 3),), ours), "prefill", 1)
    b = start(Shape((group(VEC, 48, heads, 3),), theirs), "decode", 2)
    same_heads(a)
    tables = [[5, 2, 9, 0, 7, 11, 3]], [[3, 1, 8]]
    ticket, agreement = hand_over(a, b, 101, *tables)
    assert agreement.exact
    np.testing.assert_array_equal(whole(a, 0, tables[0][0], 0, 101), whole(b, 0, tables[1][0], 0, 101))
    assert b.states(ticket) == ["loaded"] * theirs
    assert set(a.states(ticket)) == {"drained"}
    sums = [
        sum(int(e._ledger.get(ticket.handoff).digest or "0", 16) for e in side.endpoints) % (1 << 64)  # type: ignore[union-attr]
        for side in (a, b)
    ]
    assert sums[0] == sums[1], "the digests of all ranks add up to one number on both sides"


@pytest.mark.parametrize(("ours", "theirs"), [((1, 3), (1, 1)), ((1, 1), (1, 3)), ((2, 2), (1, 3)), ((1, 2), (2, 3))])
def test_pipelines_may_differ(start: Start, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    a = start(Shape((group(SLOTS, 16, 4, 5),), *ours), "prefill", 1)
    b = start(Shape((group(NZ, 32, 4, 5),), *theirs), "decode", 2)
    tables = [[5, 2, 9, 0, 7, 11, 3]], [[3, 1, 8, 6]]
    hand_over(a, b, 101, *tables)
    np.testing.assert_array_equal(whole(a, 0, tables[0][0], 0, 101), whole(b, 0, tables[1][0], 0, 101))


def test_latent_vectors_are_on_every_rank(start: Start) -> None:
    a = start(Shape((group(MLA, 64, 1, 3, dim=80),), 4), "prefill", 1)
    b = start(Shape((group("dim 64+16 | block token dim", 16, 1, 3, dim=80),), 2), "decode", 2)
    same_heads(a)
    tables = [[4, 2]], [[3, 1, 8, 6, 0, 9, 2]]
    ticket, agreement = hand_over(a, b, 101, *tables)
    np.testing.assert_array_equal(whole(a, 0, tables[0][0], 0, 101), whole(b, 0, tables[1][0], 0, 101))
    # Two consumers need two of the four copies; the other two ranks stage nothing.
    assert agreement.takes == ((0,), (1,))
    assert [e._ledger.get(ticket.handoff).kv_bytes > 0 for e in a.endpoints] == [True, True, False, False]  # type: ignore[union-attr]


@pytest.mark.parametrize(("heads", "theirs", "parts"), [(4, 1, 1), (4, 2, 2), (4, 4, 4), (2, 4, 2), (1, 2, 1)])
def test_a_push_is_as_large_however_many_ranks_share_a_chunk(start: Start, heads: int, theirs: int, parts: int) -> None:
    """Its messages cost the same for half of it. Ranks with copies of a head do not share: each takes all of it."""
    a = start(Shape((group(HND, 16, heads, 3),), blocks=90), "prefill", 1, chunk=CHUNK, transport=Meddling)
    b = start(Shape((group(HND, 16, heads, 3),), theirs, blocks=90), "decode", 2)
    links = a.endpoints[0].transports.running["tcp"]
    assert isinstance(links, Meddling)
    sizes: list[int] = []

    def note(pushes: Sequence[Push]) -> Sequence[Push]:
        sizes.append(sum(push.source.nbytes for push in pushes))
        return pushes

    links.meddle = note
    hand_over(a, b, 1400, [list(range(88))], [list(range(88))])
    per_token = a.held[0][0].wire().token_bytes // parts
    assert max(sizes) == CHUNK // per_token // TILE * TILE * per_token


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layouts=st.tuples(*[st.sampled_from([NHD, HND, VEC, SLOTS, NZ])] * 2),
    blocks=st.tuples(*[st.sampled_from([16, 32, 48, 64])] * 2),
    heads=st.sampled_from([1, 2, 4, 8]),
    layers=st.integers(1, 4),
    sizes=st.tuples(*[st.sampled_from([1, 2, 4])] * 2, *[st.integers(1, 2)] * 2),
    tokens=st.integers(1, 200),
    start=st.integers(0, 199),
    seed=st.integers(0, 1000),
)
def test_any_pair(
    layouts: tuple[str, str],
    blocks: tuple[int, int],
    heads: int,
    layers: int,
    sizes: tuple[int, ...],
    tokens: int,
    start: int,
    seed: int,
) -> None:
    ours_tp, theirs_tp, ours_pp, theirs_pp = sizes
    start = min(start, tokens - 1)
    shapes = (
        Shape((group(layouts[0], blocks[0], heads, layers),), ours_tp, min(ours_pp, layers)),
        Shape((group(layouts[1], blocks[1], heads, layers),), theirs_tp, min(theirs_pp, layers)),
    )
    rng = np.random.default_rng(seed)
    tables = [[rng.permutation(24)[: -(-tokens // size)].tolist()] for size in blocks]
    with ExitStack() as stack:
        a, b = (Engine.start(shape, role, seed) for shape, role in zip(shapes, ("prefill", "decode"), strict=True))
        stack.callback(a.close)
        stack.callback(b.close)
        same_heads(a)
        before = [[array.copy() for part in groups for array in part.values.layers] for groups in b.held]
        hand_over(a, b, tokens, *tables, start=start)
        got, expected = whole(b, 0, tables[1][0], start, tokens), whole(a, 0, tables[0][0], start, tokens)
        np.testing.assert_array_equal(got, expected)
        # Everything else is as it was: put the old tokens back and compare all of it.
        for groups, old in zip(b.held, before, strict=True):
            cache = groups[0].values
            fresh = type(cache)(tuple(old), cache.bound)
            wire = np.empty(cache.wire_shape(tokens - start), cache.dtype)
            fresh.gather(tables[1][0], Chunk(start, tokens), wire)
            cache.scatter(wire, start, tables[1][0], Chunk(start, tokens))
            for array, was in zip(cache.layers, old, strict=True):
                np.testing.assert_array_equal(array, was)


@given(
    heads=st.sampled_from([1, 2, 4, 8]),
    sizes=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2),
    tokens=st.integers(1, 60),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_the_pieces_of_a_chunk_are_its_parts(heads: int, sizes: tuple[int, int], tokens: int, dtype: str) -> None:
    """Without sockets: what is cut out of the staged chunk, put together, is the part's own wire form."""
    ours, theirs = (Shape((group(NHD, 16, heads, 2, dtype),), size) for size in sizes)
    a, b = ours.contract("prefill", "a"), theirs.contract("decode", "b")
    sources = [ours.hold(rank, 7) for rank in a.ranks]
    for rank, places in zip(b.ranks, agree(a, b).takes, strict=True):
        needs = Needs(held(b.groups, rank))
        for place in places:
            source: Group = sources[place][0]
            form = source.wire()
            chunk = next(chunks(0, tokens, 64))
            staged = memoryview(bytearray(form.length(chunk.tokens)))
            source.stage(list(range(4)), chunk, staged, form.dtype)
            for share in needs.take(held(a.groups, a.ranks[place])):
                part = form.part(share.layers, share.heads)
                pieces = b"".join(staged[i:j] for i, j in form.pieces(part, chunk.tokens))
                assert len(pieces) == part.length(chunk.tokens)
                first = share.heads[0] - source.heads[0]
                expected = form.elements(staged, chunk.tokens)[:, :, first : first + share.heads[1] - share.heads[0]]
                assert pieces == expected.tobytes()
                tiles = form.part_of(form.digests(chunk, staged), part)
                assert (tiles == part.digests(chunk, memoryview(bytearray(pieces)))).all()


def test_one_rank_that_fails_ends_the_load_of_every_source(start: Start) -> None:
    """The second source sends a flipped bit: the rank's load fails by name, and the other source is let go."""
    a = start(Shape((group(HND, 16, 4, 3),), 2), "prefill", 1, transport=Meddling)
    b = start(Shape((group(HND, 32, 4, 3),)), "decode", 2)
    links = a.endpoints[1].transports.running["tcp"]
    assert isinstance(links, Meddling)

    def flip(pushes):  # type: ignore[no-untyped-def]
        data = bytearray(pushes[0].source)
        data[0] ^= 1
        return [type(pushes[0])(memoryview(data), pushes[0].key, pushes[0].offset), *pushes[1:]]

    links.meddle = flip
    tables = [[5, 2, 9, 0, 7, 11, 3]], [[3, 1, 8, 6]]
    agreement = agree(a.contract, b.contract)
    ticket = tickets.issue(tickets.new_handoff(), a.contract, b.contract, agreement, 30_000)
    a.open(ticket, 101)
    b.load(ticket, tables[1], 0, 101)
    a.fill(ticket, tables[0], 101)
    (outcome,) = b.ended()
    assert outcome.reason is not None
    assert (outcome.reason.code, "head 2" in outcome.reason.message) == ("digest_mismatch", True)
    b.quiet()
    a.quiet()
    assert b.states(ticket) == ["failed"]
    assert a.states(ticket)[1] == "failed"


def test_a_ticket_of_another_number_of_ranks(start: Start) -> None:
    a = start(Shape((group(HND, 16, 4, 3),), 2), "prefill", 1)
    b = start(Shape((group(HND, 32, 4, 3),), 2), "decode", 2)
    agreement = agree(a.contract, b.contract)
    ticket = tickets.issue(tickets.new_handoff(), a.contract, b.contract, agreement, 30_000)
    b.endpoints = b.endpoints[1:]
    b.load(msgspec.structs.replace(ticket, takes=((0,),)), [[3, 1, 8, 6]], 0, 101)
    (outcome,) = b.ended()
    assert outcome.reason is not None
    assert (outcome.reason.code, outcome.reason.field) == ("ticket_refused", "ranks")
    b.quiet()

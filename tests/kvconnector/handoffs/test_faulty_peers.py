"""Peers that hold the secret and keep to the message format, but not to the protocol; and engines that ask for what
there is not. Each ends by name, at once, with nothing held."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from loopback import HND, NHD, SECRET, Pair
from sockets import eventually
from world import Engine, Shape, agree, hand_over, read

from deeplink.errors import LayoutError, Reason
from deeplink.kvconnector.contracts.contract import CacheGroup, encode
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.landing import MOST
from deeplink.kvconnector.handoffs.offer import Staged, let_go, release, settle
from deeplink.kvconnector.handoffs.order import Order
from deeplink.kvconnector.handoffs.ticket import Ticket
from deeplink.kvconnector.relayout.plan import Chunk
from deeplink.kvconnector.transport.staging import Staging

replace = msgspec.structs.replace
TOKENS = 333
OURS, THEIRS = [5, 2, 9, 0, 7, 11], [3, 1, 8]
WHOLE = ch.Part(0, (0, 1, 2), (0, 2), 0, TOKENS)
Make = Callable[..., Pair]
Start = Callable[..., Engine]


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def peer(pair: Pair) -> ch.Channel:
    """A consumer played by the test, after both Hellos."""
    channel = ch.Channel.connect(pair.producer.endpoint.contract.ranks[0].channel, SECRET, soon())
    channel.send(ch.Hello(encode(pair.consumer.endpoint.contract)), soon())
    assert isinstance(channel.receive(soon()), ch.Hello)
    return channel


def claim(pair: Pair, text: str, *parts: ch.Part, name: bytes = b"claim", stop: int = TOKENS) -> ch.Channel:
    channel = peer(pair)
    address = pair.consumer.transport.address
    channel.send(ch.Claim(text, name, b"prompt", parts, "tcp", address, stop), soon())
    return channel


def last(channel: ch.Channel) -> Reason:
    """The Fail that the conversation ends with."""
    while not isinstance(message := channel.receive(soon()), ch.Fail):
        assert isinstance(message, (ch.Accept, ch.Chunk, ch.Sent))
    channel.close()
    return message.reason


def opened(pair: Pair, computed: int = TOKENS, **changes: object) -> tuple[Ticket, str]:
    ticket, text = pair.ticket(30, **changes)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, computed)
    return ticket, text


# -- consumers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((WHOLE,) * 256, "twice"),
        ((replace(WHOLE, layers=(0, 1)), replace(WHOLE, layers=(1, 2), heads=(1, 2))), "head 1 of layer 1"),
        ((replace(WHOLE, layers=(0, 0)),), "layers"),
        ((replace(WHOLE, layers=(3,)),), "layers"),
        ((replace(WHOLE, heads=(1, 1)),), "heads"),
        ((replace(WHOLE, heads=(2, 1)),), "heads"),
        ((replace(WHOLE, heads=(0, 3)),), "heads"),
        ((replace(WHOLE, group=1),), "cache group"),
        ((replace(WHOLE, start=9, stop=8),), "tokens [9, 8)"),
        ((replace(WHOLE, stop=TOKENS + 1),), "prompt of 333"),
    ],
)
def test_a_claim_on_what_there_is_not_or_twice(pair: Pair, parts: Sequence[ch.Part], says: str) -> None:
    """The same part 256 times would be pushed 256 times."""
    ticket, text = opened(pair)
    reason = last(claim(pair, text, *parts))
    assert reason.code == "protocol_error"
    assert says in reason.message
    pair.settle(ticket, "failed", None)


@pytest.mark.parametrize(
    "parts",
    [
        (replace(WHOLE, layers=(0,)),),
        (replace(WHOLE, start=100, stop=200),),
        (replace(WHOLE, start=16),),
        (WHOLE, replace(WHOLE, start=TOKENS)),
        (),
    ],
)
def test_a_claim_that_comes_back_for_something_else(pair: Pair, parts: Sequence[ch.Part]) -> None:
    """What landed before is gone; a claim that begins further on than it did is one for less, or for a gap."""
    ticket, text = opened(pair, 200)
    first = claim(pair, text, replace(WHOLE, start=32))
    assert isinstance(first.receive(soon()), ch.Accept)
    first.close()
    assert last(claim(pair, text, *parts)).code == "protocol_error"
    sent, _ = pair.settle(ticket, "failed", None)
    assert sent is not None
    assert sent.reason is not None
    assert sent.reason.code == "peer_gone"  # nobody has come back for what it was made for


def test_a_claim_that_was_under_way_for_long_does_not_end_the_one_that_overtook_it(pair: Pair) -> None:
    """The consumer has come back twice, and the older of the two connections is looked at last."""
    ticket, text = opened(pair, 200)
    newer = claim(pair, text, replace(WHOLE, start=32))
    assert isinstance(newer.receive(soon()), ch.Accept)
    assert last(claim(pair, text, WHOLE)).code == "protocol_error"
    assert pair.producer.endpoint.producer.claims == 1
    message = newer.receive(soon())
    assert isinstance(message, ch.Chunk)
    newer.send(ch.Landed(message.index), soon())
    newer.send(ch.Quit(Reason("aborted", "enough")), soon())
    assert last(newer).code == "aborted"
    pair.settle(ticket, "aborted", None)


def test_a_claim_of_nothing_lets_the_producer_go(pair: Pair) -> None:
    ticket, text = opened(pair)
    channel = claim(pair, text, replace(WHOLE, start=TOKENS))
    assert isinstance(channel.receive(soon()), ch.Accept)
    assert isinstance(channel.receive(soon()), ch.End)
    channel.close()
    pair.settle(ticket, "drained", None)


def test_more_claims_than_the_ticket_allows(pair: Pair) -> None:
    ticket, text = opened(pair, 16, claims=64)
    channels = []
    for number in range(64):
        channels.append(claim(pair, text, WHOLE, name=bytes([number])))
        assert isinstance(channels[-1].receive(soon()), ch.Accept)
    assert pair.producer.endpoint.producer.claims == 64
    assert last(claim(pair, text, WHOLE, name=b"one more")).field == "claims"
    pair.producer.endpoint.producer.abort(ticket.handoff)
    for channel in channels:
        assert last(channel).code == "aborted"
    pair.settle(ticket, "aborted", None)


def test_a_claim_while_its_handoff_is_under_way_elsewhere_costs_no_processor(pair: Pair) -> None:
    """A record that is not final is waited for, not looked at over and over again."""
    ticket, text = pair.ticket(30)
    pair.producer.endpoint._ledger.begin(ticket.handoff, "consumer", "receiving")
    channel = claim(pair, text, WHOLE)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.15
    channel.send(ch.Quit(Reason("aborted", "enough")), soon())
    assert last(channel).code == "aborted"
    pair.producer.endpoint._ledger.end(ticket.handoff, "failed")


def test_digests_are_let_go_with_their_chunk(pair: Pair) -> None:
    """Those of a long prompt are megabytes, and staging does not count them."""
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, 200)
    offer = pair.producer.endpoint.producer._offers.get(ticket.handoff)
    assert offer is not None
    eventually(lambda: offer.staged and all(staged.free for staged in offer.staged))
    assert [staged.digests for staged in offer.staged] == [None] * len(offer.staged)
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")


@pytest.mark.parametrize("ends", [("read", "claim", "end"), ("claim", "read", "end"), ("end", "claim", "read")])
def test_a_piece_is_given_back_once_whoever_comes_last(ends: Sequence[str]) -> None:
    staging = Staging(1 << 12)
    piece = staging.try_allocate(100)
    assert piece is not None
    staged = Staged(0, Chunk(0, 16), piece, claims=1, readers=1)
    for end in (*ends, "end", "claim"):
        held = staged.claims > 0 or staged.readers > 0
        assert (staging.used > 0) == held
        if end == "read":
            staged.readers -= 1
            settle(staged, staging)
        else:
            (release if end == "claim" else let_go)(staged, staging)
    assert staging.used == 0


# -- producers -----------------------------------------------------------------------------------------------


def producer_says(pair: Pair, tokens: int, *messages: ch.Message) -> Reason:
    """What the consumer makes of a producer that answers its claim with these messages and then waits."""

    def serve(channel: ch.Channel, *_: object) -> None:
        for message in messages:
            channel.send(message, soon())
        while not isinstance(channel.receive(soon()), ch.Quit):
            pass

    pair.producer.endpoint.producer.serve = serve  # type: ignore[method-assign, assignment]
    ticket, text = pair.ticket(20)
    pair.load(pair.order(ticket, text, range(24), tokens))
    reason = pair.outcome(15).reason
    assert reason is not None
    pair.settle(ticket, None, "failed")
    return reason


def chunk(index: int, start: int, stop: int) -> ch.Chunk:
    return ch.Chunk(index, 0, start, stop, (stop - start) * 1536, b"")


def test_chunks_announced_without_end(make: Make) -> None:
    """All of them are remembered, with their digests, until each has had its place."""
    pair = make(consumer={"staging": 16 * 1536})
    many = [chunk(at, at, at + 1) for at in range(MOST + 100)]
    reason = producer_says(pair, 2 * MOST, ch.Accept(), *many)
    assert (reason.code, f"more than {MOST} chunks" in reason.message) == ("protocol_error", True)


def test_a_chunk_after_the_end_of_its_part(pair: Pair) -> None:
    reason = producer_says(pair, TOKENS, ch.Accept(), chunk(0, 0, 400), chunk(1, 400, 500))
    assert reason.code == "protocol_error"


# -- the engines' own mistakes, and their edges ---------------------------------------------------------------


def test_too_few_block_tables(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    with pytest.raises(LayoutError, match="0 block tables"):
        pair.producer.endpoint.producer.fill(ticket.handoff, (), TOKENS)
    pair.load(Order("request", ticket, text, b"prompt", 0, TOKENS, ()))
    reason = pair.outcome().reason
    assert reason is not None
    assert (reason.code, "0 block tables" in reason.message) == ("layout_error", True)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.settle(ticket, "aborted", "failed")


def test_a_prompt_of_no_tokens(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, 0)
    pair.producer.endpoint.producer.pump()
    assert pair.producer.endpoint.producer.settled(ticket.handoff)
    pair.load(pair.order(ticket, text, [], 0))
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")


FULL = CacheGroup("full", (0, 1), 4, 16, "bfloat16", 16, NHD)
SLIDING = CacheGroup("sliding", (2, 3), 4, 16, "bfloat16", 16, NHD, window=40)
STATE = CacheGroup("state", (4,), 1, 384, "float32", 1, "block token dim")


def test_a_state_of_a_prompt_of_no_tokens_waits_for_its_blocks(start: Start) -> None:
    a = start(Shape((FULL, STATE)), "prefill", 1)
    b = start(Shape((FULL, STATE)), "decode", 2)
    ticket = tickets.issue(tickets.new_handoff(), a.contract, b.contract, agree(a.contract, b.contract), 20_000)
    a.open(ticket, 0)
    a.endpoints[0].producer.pump()
    assert not a.endpoints[0].producer.settled(ticket.handoff)
    a.endpoints[0].producer.abort(ticket.handoff)
    a.quiet()


@pytest.mark.parametrize("pp", [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_a_rank_without_layers_of_a_group(start: Start, pp: tuple[int, int]) -> None:
    """Its tokens have no bytes there, by which the size of a chunk was divided."""
    groups = FULL, replace(SLIDING, kind="full", window=0)
    a = start(Shape(groups, pp=pp[0]), "prefill", 1)
    b = start(Shape(tuple(replace(group, layout=HND) for group in groups), pp=pp[1]), "decode", 2)
    tables = [[5, 2, 9, 0, 7, 11, 3]] * 2, [[3, 1, 8, 6, 2, 12, 4]] * 2
    hand_over(a, b, 101, *tables)
    for index in range(2):
        ours, theirs = (
            np.concatenate([read(held, index, table[index], 0, 101) for held in side.held if held[index].layers])
            for side, table in zip((a, b), tables, strict=True)
        )
        np.testing.assert_array_equal(ours, theirs)


def test_a_rank_without_any_layer_takes_from_nobody(start: Start) -> None:
    one = replace(FULL, layers=(0,))
    a = start(Shape((one,)), "prefill", 1)
    b = start(Shape((one,), pp=2), "decode", 2)
    _, agreement = hand_over(a, b, 101, [[5, 2, 9, 0, 7, 11, 3]], [[3, 1, 8, 6, 2, 12, 4]])
    assert agreement.takes == ((), (0,))


def refused(a: Engine, b: Engine, begin: int, stop: int) -> Reason:
    """Why tokens ``[begin, stop)`` of a prompt of 101 are not loaded."""
    ticket = tickets.issue(tickets.new_handoff(), a.contract, b.contract, agree(a.contract, b.contract), 20_000)
    tables = [[5, 2, 9, 0, 7, 11, 3]] * len(a.contract.groups)
    a.open(ticket, 101)
    a.fill(ticket, tables, 101)
    b.load(ticket, tables, begin, stop)
    (outcome,) = b.ended()
    assert outcome.reason is not None
    a.quiet()
    b.quiet()
    assert (a.states(ticket), b.states(ticket)) == (["failed"], ["failed"])
    return outcome.reason


@pytest.mark.parametrize(("begin", "stop"), [(0, 100), (50, 100), (0, 1)])
def test_the_state_after_other_tokens_is_not_loaded(start: Start, begin: int, stop: int) -> None:
    """What was staged is the state after the whole prompt; a consumer that goes on one token earlier wants another."""
    a, b = (start(Shape((FULL, STATE)), role, seed) for seed, role in enumerate(("prefill", "decode")))
    reason = refused(a, b, begin, stop)
    assert (reason.code, reason.field, reason.ours, reason.theirs) == ("contract_refused", "tokens", "101", str(stop))
    assert f"hand over {stop} tokens" in reason.remedy


@pytest.mark.parametrize("tokens", [100, 96, 101])
def test_the_state_of_as_many_tokens_as_are_handed_over(start: Start, tokens: int) -> None:
    """An engine that computes the last token of 101 itself goes on from the state after 100; any number will do."""
    a, b = (start(Shape((FULL, STATE)), role, seed) for seed, role in enumerate(("prefill", "decode")))
    tables = [[5, 2, 9, 0, 7, 11, 3], [13]], [[3, 1, 8, 6, 2, 12, 4], [4]]
    hand_over(a, b, tokens, *tables)
    for index, stop in ((0, tokens), (1, 1)):
        ours, theirs = (
            read(side.held[0], index, table[index], 0, stop) for side, table in zip((a, b), tables, strict=True)
        )
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("steps", [(48, 101), (101,)])
def test_a_state_that_prefill_has_gone_past(start: Start, steps: tuple[int, ...]) -> None:
    """It is overwritten in its block, so it is not staged for the one it was; the claim that waits is told why."""
    a, b = (start(Shape((FULL, STATE)), role, seed) for seed, role in enumerate(("prefill", "decode")))
    ticket = tickets.issue(tickets.new_handoff(), a.contract, b.contract, agree(a.contract, b.contract), 20_000)
    tables = [[5, 2, 9, 0, 7, 11, 3], [13]]
    before = read(b.held[0], 1, [4], 0, 1)
    a.open(ticket, 100)
    b.load(ticket, [[3, 1, 8, 6, 2, 12, 4], [4]], 0, 100)
    for computed in steps:
        a.fill(ticket, tables, computed)
    (outcome,) = b.ended()
    reason = outcome.reason
    assert reason is not None
    assert (reason.code, reason.field, reason.ours, reason.theirs) == ("handoff_failed", "tokens", "101", "100")
    a.quiet()
    b.quiet()
    assert (a.states(ticket), b.states(ticket)) == (["failed"], ["failed"])
    np.testing.assert_array_equal(read(b.held[0], 1, [4], 0, 1), before)


def test_a_window_that_is_not_kept_any_more(start: Start) -> None:
    a, b = (start(Shape((FULL, SLIDING)), role, seed) for seed, role in enumerate(("prefill", "decode")))
    reason = refused(a, b, 0, 60)
    assert (reason.code, reason.field) == ("contract_refused", "tokens")
    assert (reason.ours, reason.theirs) == ("[48, 101)", "[21, 60)")


def test_what_comes_after_the_end_of_an_engine_ends_at_once(pair: Pair) -> None:
    for side in (pair.producer, pair.consumer):
        side.endpoint.close()
    ticket, text = pair.ticket(30)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    reason = pair.outcome(1).reason
    assert reason is not None
    assert reason.code == "aborted"
    pair.settle(ticket, "aborted", "failed")

"""Every other way a handover can end: by name, once on each side, with nothing held and nothing changed."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
import pytest
from loopback import SECRET, Gate, Pair, make_side, read
from sockets import eventually

from deeplink.config import KVSection
from deeplink.errors import ConfigError, LayoutError, Reason, TicketRefused
from deeplink.kvconnector.contracts.contract import WIRE_VERSION, Contract
from deeplink.kvconnector.endpoint import Settings
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs import consumer as consumer_module
from deeplink.kvconnector.handoffs.offer import Offer
from deeplink.kvconnector.handoffs.serve import AHEAD
from deeplink.kvconnector.handoffs.ticket import Ticket, mint
from deeplink.kvconnector.transport.base import Push

TOKENS = 333
OURS, THEIRS = [5, 2, 9, 0, 7, 11], [3, 1, 8]
TILE = 16 * 1536
Make = Callable[..., Pair]


def failed(pair: Pair, seconds: float = 10.0) -> Reason:
    reason = pair.outcome(seconds).reason
    assert reason is not None
    return reason


def untouched(pair: Pair, before: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(pair.consumer.cache.layers, before, strict=True))


def snapshot(pair: Pair) -> list[np.ndarray]:
    return [layer.copy() for layer in pair.consumer.cache.layers]


def start(pair: Pair, computed: int = TOKENS, seconds: float = 10.0) -> tuple[Ticket, str]:
    """Opened, claimed, and filled so far."""
    ticket, text = pair.ticket(seconds)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    pair.fill(ticket, OURS, computed)
    return ticket, text


def still_works(pair: Pair) -> None:
    """The same two engines, the same connections, and the next request."""
    ticket, _ = start(pair)
    pair.pump(ticket)
    assert pair.outcome().reason is None
    np.testing.assert_array_equal(
        read(pair.consumer.cache, THEIRS, 0, TOKENS), read(pair.producer.cache, OURS, 0, TOKENS)
    )
    pair.settle(ticket, "drained", "loaded")


# -- never claimed, never opened -----------------------------------------------------------------------------


def test_nobody_claims(pair: Pair) -> None:
    ticket, text = pair.ticket(0.4)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, TOKENS)
    sent, _ = pair.settle(ticket, "expired", None)
    assert sent is not None
    assert sent.reason is not None
    assert sent.reason.code == "deadline_exceeded"
    # Too late: the claim hears why.
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    assert failed(pair).code == "deadline_exceeded"
    pair.settle(ticket, "expired", "failed")
    still_works(pair)


def test_nobody_opens(pair: Pair) -> None:
    ticket, text = pair.ticket(0.4)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    assert failed(pair).code == "deadline_exceeded"
    pair.settle(ticket, None, "failed")
    still_works(pair)


def test_prefill_does_not_go_on(pair: Pair) -> None:
    before = snapshot(pair)
    ticket, _ = start(pair, computed=0, seconds=0.5)
    assert failed(pair).code == "deadline_exceeded"
    pair.settle(ticket, "expired", "failed")
    assert untouched(pair, before)
    still_works(pair)


def test_prefill_stops_half_way(pair: Pair) -> None:
    ticket, _ = start(pair, computed=200, seconds=0.6)
    assert failed(pair).code == "deadline_exceeded"
    pair.settle(ticket, "expired", "failed")
    still_works(pair)


# -- given up by the producer --------------------------------------------------------------------------------


def test_aborted_before_the_claim(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, 200)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    assert failed(pair).code == "aborted"
    pair.settle(ticket, "aborted", "failed")
    pair.producer.endpoint.producer.abort(ticket.handoff)  # late
    pair.settle(ticket, "aborted", "failed")
    still_works(pair)


@pytest.mark.parametrize("computed", [0, 200])
def test_aborted_while_the_consumer_waits(pair: Pair, computed: int) -> None:
    ticket, _ = start(pair, computed)
    eventually(lambda: pair.producer.endpoint._outgoing.used == 0 and pair.producer.endpoint.producer.claims == 1)
    pair.producer.endpoint.producer.abort(ticket.handoff, Reason("prefill_failed", "no more memory", "memory"))
    reason = failed(pair)
    assert (reason.code, reason.message, reason.field) == ("prefill_failed", "no more memory", "memory")
    pair.settle(ticket, "aborted", "failed")
    still_works(pair)


@pytest.mark.parametrize("passes", [0, 1, 4])
def test_aborted_during_a_push(pair: Pair, passes: int) -> None:
    gate = Gate(passes)
    pair.producer.transport.meddle = gate
    ticket, _ = start(pair)
    assert gate.reached.wait(10)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    assert pair.producer.endpoint._outgoing.used > 0  # what is being read cannot be given to others yet
    gate.open()
    assert failed(pair).code == "aborted"
    pair.settle(ticket, "aborted", "failed")
    pair.producer.transport.meddle = lambda pushes: pushes
    still_works(pair)


def test_an_abort_is_heard_by_a_consumer_that_waits_for_room(make: Make) -> None:
    """It has a chunk announced and says nothing, so the producer has to speak first."""
    pair = make(consumer={"staging": 4 * TILE})
    everything = pair.consumer.endpoint._incoming.try_allocate(4 * TILE)
    assert everything is not None
    ticket, _ = start(pair, seconds=60)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    assert failed(pair).code == "aborted"
    pair.consumer.endpoint._incoming.release(everything)
    pair.settle(ticket, "aborted", "failed")
    still_works(pair)


def test_aborted_after_the_end(pair: Pair) -> None:
    ticket, _ = start(pair)
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    pair.producer.endpoint.producer.lose(ticket.handoff)
    pair.fill(ticket, OURS, TOKENS)
    pair.settle(ticket, "drained", "loaded")
    still_works(pair)


def test_the_producer_shuts_down(pair: Pair) -> None:
    ticket, _ = start(pair, computed=200)
    pair.producer.endpoint.close()
    assert failed(pair).code in ("aborted", "peer_gone")
    pair.settle(ticket, "aborted", "failed")


# -- given up by the consumer --------------------------------------------------------------------------------


def test_cancelled_before_prefill_starts(pair: Pair) -> None:
    ticket, text = pair.ticket(0.8)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    eventually(lambda: pair.consumer.endpoint.consumer._loads[ticket.handoff].channels)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    assert failed(pair).code == "aborted"
    pair.settle(ticket, None, "failed")
    # The producer's engine may start the prefill all the same; nobody will come for it.
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, TOKENS)
    pair.settle(ticket, "expired", "failed")
    still_works(pair)


@pytest.mark.parametrize("claimed", [False, True])
def test_given_up_before_prefill_starts(pair: Pair, claimed: bool) -> None:
    """The client has left while its request still waited in the prefill engine, which the router tells that engine."""
    ticket, text = pair.ticket(60)
    if claimed:
        pair.load(pair.order(ticket, text, THEIRS, TOKENS))
        eventually(lambda: pair.consumer.endpoint.consumer._loads[ticket.handoff].channels)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    if claimed:
        assert failed(pair).code == "ticket_refused"
    with pytest.raises(TicketRefused, match="given up before prefill began"):
        pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, TOKENS)
    pair.quiet()
    still_works(pair)


def test_given_up_just_while_it_is_opened(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, _ = pair.ticket(60)
    producer = pair.producer.endpoint.producer
    offers = producer._offers
    add = offers.add

    def late(offer: Offer) -> None:
        producer.abort(ticket.handoff)
        add(offer)

    monkeypatch.setattr(offers, "add", late)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, TOKENS)
    pair.settle(ticket, "aborted", None)
    monkeypatch.undo()
    still_works(pair)


@pytest.mark.parametrize("computed", [0, 200])
def test_cancelled_while_prefill_runs(pair: Pair, computed: int) -> None:
    ticket, _ = start(pair, computed)
    eventually(lambda: pair.producer.endpoint.producer.claims == 1 and pair.producer.endpoint._outgoing.used == 0)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    assert failed(pair).code == "aborted"
    pair.settle(ticket, "aborted", "failed")
    pair.fill(ticket, OURS, TOKENS)  # the prefill goes on regardless
    assert pair.producer.endpoint.producer.settled(ticket.handoff)
    pair.settle(ticket, "aborted", "failed")
    still_works(pair)


@pytest.mark.parametrize("passes", [0, 1, 4])
def test_cancelled_during_a_push(pair: Pair, passes: int) -> None:
    """The blocks are the engine's again when the outcome is there, whatever the producer does then."""
    gate = Gate(passes)
    pair.producer.transport.meddle = gate
    ticket, _ = start(pair)
    assert gate.reached.wait(10)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    assert failed(pair).code == "aborted"
    after = snapshot(pair)
    gate.open()
    pair.settle(ticket, "aborted", "failed")
    assert untouched(pair, after)
    pair.producer.transport.meddle = lambda pushes: pushes
    still_works(pair)


def test_cancelled_while_waiting_for_room(make: Make) -> None:
    pair = make(consumer={"staging": 4 * TILE})
    everything = pair.consumer.endpoint._incoming.try_allocate(4 * TILE)
    assert everything is not None
    ticket, _ = start(pair, seconds=60)
    eventually(lambda: pair.producer.record(ticket).state == "staged")  # type: ignore[union-attr]
    time.sleep(0.1)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    assert failed(pair).code == "aborted"
    pair.consumer.endpoint._incoming.release(everything)
    pair.settle(ticket, "aborted", "failed")
    still_works(pair)


def no_more_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    start = threading.Thread.start

    def _start(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", _start)


def test_no_thread_for_a_load(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, text = pair.ticket()
    with monkeypatch.context() as patch:
        no_more_threads(patch, "deeplink-load")
        pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    reason = failed(pair)
    assert reason.code == "handoff_failed"
    assert "can't start new thread" in reason.message
    assert pair.consumer.endpoint.consumer.claims == 0
    pair.settle(ticket, None, "failed")
    still_works(pair)


def test_no_thread_to_tell_the_producer_of_a_cancel(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, _ = start(pair, 200)
    eventually(lambda: pair.producer.endpoint.producer.claims == 1 and pair.producer.endpoint._outgoing.used == 0)
    with monkeypatch.context() as patch:
        no_more_threads(patch, "deeplink-part")
        pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    assert failed(pair).code == "aborted"
    pair.quiet()
    still_works(pair)


def test_cancelled_for_another_request(pair: Pair) -> None:
    """A late notice about an old request does not end the new one's load."""
    ticket, _ = start(pair, computed=200)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff, "another request")
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")


@pytest.mark.parametrize("seconds", [0, 0.001, 0.003, 0.006, 0.01, 0.02])
def test_cancelled_at_any_moment(pair: Pair, seconds: float) -> None:
    """Exactly one outcome; and channels that go back to the pool are whole."""
    for _ in range(4):
        # A claim that was never sent leaves the producer waiting until the deadline.
        ticket, _ = start(pair, seconds=1.5 if seconds else 0.5)
        time.sleep(seconds)
        pair.consumer.endpoint.consumer.cancel(ticket.handoff)
        reason = pair.outcome().reason
        assert reason is None or reason.code == "aborted"
        pair.quiet()
        assert pair.consumer.record(ticket).state == ("loaded" if reason is None else "failed")  # type: ignore[union-attr]
    still_works(pair)


def test_the_consumer_shuts_down(pair: Pair) -> None:
    ticket, _ = start(pair, computed=200)
    eventually(lambda: pair.producer.endpoint.producer.claims == 1)
    pair.consumer.endpoint.close()
    assert failed(pair).code == "aborted"
    pair.settle(ticket, "aborted", "failed")


# -- refused -------------------------------------------------------------------------------------------------


def test_another_prompt(pair: Pair) -> None:
    before = snapshot(pair)
    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS, b"\x01")
    pair.fill(ticket, OURS, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS, prompt=b"\x02"))
    reason = failed(pair)
    assert (reason.code, reason.field, reason.ours, reason.theirs) == ("contract_refused", "prompt", "01", "02")
    # Its only claim is used up, so nothing is kept for the rest of the minute.
    sent, _ = pair.settle(ticket, "failed", "failed")
    assert sent is not None
    assert sent.reason is not None
    assert sent.reason.field == "prompt"
    assert untouched(pair, before)
    still_works(pair)


def test_more_tokens_than_the_prompt_has(pair: Pair) -> None:
    ticket, text = pair.ticket(60)
    pair.open(ticket, 100)
    pair.fill(ticket, OURS, 100)
    pair.load(pair.order(ticket, text, THEIRS, 101))
    assert failed(pair).code == "protocol_error"
    pair.settle(ticket, "failed", "failed")
    still_works(pair)


def test_other_weights_are_refused_before_any_chunk(make: Make) -> None:
    pair = make(consumer={"weights": "other"})
    pushed = threading.Event()
    pair.producer.transport.meddle = lambda pushes: (pushed.set(), pushes)[1]
    before = snapshot(pair)
    ticket, _ = start(pair, seconds=60)
    reason = failed(pair)
    assert (reason.code, reason.field) == ("contract_refused", "model.weights")
    assert {reason.ours, reason.theirs} == {"w", "other"}
    assert not pushed.is_set()
    assert untouched(pair, before)
    # The router, which asks after the reason, cancels the other side.
    ch.ask(pair.producer.endpoint.contract.ranks[0].channel, SECRET, ch.Cancel(ticket.handoff))
    pair.settle(ticket, "aborted", "failed")


def test_the_consumer_refuses_by_itself(make: Make) -> None:
    """Both sides negotiate, so a producer that accepts everything is refused all the same."""
    pair = make(consumer={"weights": "other"})
    pair.producer.endpoint._agree = lambda producer, consumer: None  # type: ignore[method-assign]
    ticket, _ = start(pair)
    reason = failed(pair)
    assert (reason.field, reason.ours, reason.theirs) == ("model.weights", "w", "other")
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.settle(ticket, "aborted", "failed")


def test_another_secret(make: Make) -> None:
    pair = make(consumer={"secret": SECRET + b"x"})
    ticket, _ = start(pair)
    reason = failed(pair)
    assert (reason.code, reason.field) == ("contract_refused", "secret")
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.settle(ticket, "aborted", "failed")


def test_a_forged_ticket(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, TOKENS)
    raw = bytearray(base64.urlsafe_b64decode(text))
    raw[5] ^= 1
    pair.load(pair.order(ticket, base64.urlsafe_b64encode(raw).decode(), THEIRS, TOKENS))
    reason = failed(pair)
    assert (reason.code, reason.field) == ("ticket_refused", "ticket")
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.settle(ticket, "aborted", "failed")
    still_works(pair)


def test_a_ticket_is_good_for_one_load(pair: Pair) -> None:
    ticket, text = start(pair)
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")
    before = snapshot(pair)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    assert failed(pair).field == "handoff"
    with pytest.raises(TicketRefused):
        pair.open(ticket, TOKENS)
    pair.settle(ticket, "drained", "loaded")
    assert untouched(pair, before)


def test_a_replayed_ticket_is_refused_by_the_producer(make: Make) -> None:
    """From a consumer of the same epoch that does not remember."""
    pair = make(consumer={"epoch": "decode-1"})
    ticket, text = start(pair)
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")
    again = Pair(pair.producer, make_side("decode", "block head token (kv dim)", 128, epoch="decode-1"))
    again.load(again.order(ticket, text, THEIRS, TOKENS))
    reason = failed(again)
    assert (reason.code, reason.theirs) == ("ticket_refused", "drained")
    again.settle(ticket, "drained", "failed")
    again.consumer.endpoint.close()


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_another_epoch(pair: Pair, side: str) -> None:
    ticket, _ = pair.ticket(60)
    pair.open(ticket, TOKENS)
    wrong = msgspec.structs.replace(ticket, **{side: "before the restart"})
    pair.load(pair.order(wrong, mint(wrong, SECRET), THEIRS, TOKENS))
    reason = failed(pair)
    assert (reason.code, reason.field) == ("ticket_refused", "epoch")
    assert "before the restart" in (reason.ours, reason.theirs)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.settle(ticket, "aborted", "failed")


def test_open_for_another_epoch(pair: Pair) -> None:
    ticket, _ = pair.ticket(producer="before the restart")
    with pytest.raises(TicketRefused) as caught:
        pair.open(ticket, TOKENS)
    assert caught.value.field == "epoch"
    pair.settle(ticket, None, None)


def test_a_refusal_is_kept_for_whoever_asks(pair: Pair) -> None:
    ticket, text = pair.ticket()
    pair.consumer.endpoint.refuse(ticket.handoff, Reason("ticket_refused", "no", "epoch"))
    pair.consumer.endpoint.refuse(ticket.handoff, Reason("ticket_refused", "again"))
    record = pair.consumer.record(ticket)
    assert record is not None
    assert record.reason == Reason("ticket_refused", "no", "epoch")
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    assert failed(pair).code == "ticket_refused"
    pair.settle(ticket, None, "failed")


# -- several claims ------------------------------------------------------------------------------------------


def second(pair: Pair, epoch: str) -> Pair:
    return Pair(pair.producer, make_side("decode", "block token head (kv dim)", 48, seed=9, epoch=epoch))


@pytest.mark.parametrize("order", ["together", "one after the other"])
def test_two_claims(pair: Pair, order: str) -> None:
    """Two incarnations under one epoch: the ticket counts claims, not engines."""
    other = second(pair, pair.consumer.epoch)
    ticket, text = pair.ticket(30, claims=2)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    if order == "together":
        other.load(other.order(ticket, text, list(range(7)), TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    if order != "together":
        assert pair.producer.record(ticket).state == "staged"  # type: ignore[union-attr]
        other.load(other.order(ticket, text, list(range(7)), TOKENS))
    assert other.outcome().reason is None
    expected = read(pair.producer.cache, OURS, 0, TOKENS)
    np.testing.assert_array_equal(read(pair.consumer.cache, THEIRS, 0, TOKENS), expected)
    np.testing.assert_array_equal(read(other.consumer.cache, list(range(7)), 0, TOKENS), expected)
    pair.settle(ticket, "drained", "loaded")
    other.settle(ticket, "drained", "loaded")
    other.consumer.endpoint.close()


def test_one_of_two_claims_fails_and_the_other_goes_on(pair: Pair) -> None:
    other = second(pair, pair.consumer.epoch)
    ticket, text = pair.ticket(30, claims=2)
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    other.load(other.order(ticket, text, list(range(7)), TOKENS))
    pair.fill(ticket, OURS, 200)
    eventually(lambda: pair.producer.endpoint.producer.claims == 2)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    assert failed(pair).code == "aborted"
    eventually(lambda: pair.producer.endpoint.producer.claims == 1)
    pair.fill(ticket, OURS, TOKENS)
    assert other.outcome().reason is None
    pair.settle(ticket, "drained", "failed")
    other.settle(ticket, "drained", "loaded")
    other.consumer.endpoint.close()


def test_what_a_claim_that_ended_has_not_fetched_makes_room_for_the_other(make: Make) -> None:
    """Staging is full of chunks that both want, when one of them leaves."""
    pair = make(producer={"chunk": TILE, "staging": 2 * TILE})
    other = second(pair, pair.consumer.epoch)
    gate = Gate()
    pair.producer.transport.meddle = gate
    ticket, text = pair.ticket(30, claims=2)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, TOKENS)
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    assert gate.reached.wait(10)
    pair.consumer.endpoint.consumer.cancel(ticket.handoff)
    assert failed(pair).code == "aborted"
    gate.open()
    other.load(other.order(ticket, text, list(range(7)), TOKENS))
    pair.pump(ticket)
    assert other.outcome().reason is None
    pair.settle(ticket, "drained", "failed")
    other.consumer.endpoint.close()


def test_a_claim_too_many(pair: Pair) -> None:
    other = second(pair, pair.consumer.epoch)
    ticket, text = start(pair, computed=200)
    eventually(lambda: pair.producer.endpoint.producer.claims == 1)
    other.load(other.order(ticket, text, list(range(7)), TOKENS))
    reason = failed(other)
    assert (reason.code, reason.field) == ("ticket_refused", "claims")
    pair.fill(ticket, OURS, TOKENS)
    assert pair.outcome().reason is None
    pair.settle(ticket, "drained", "loaded")
    other.settle(ticket, "drained", "failed")
    other.consumer.endpoint.close()


# -- bytes that change on the way ----------------------------------------------------------------------------


def flip(chunk: int, element: int) -> Callable[[Sequence[Push]], Sequence[Push]]:
    """Flip one bit of one element of one chunk."""
    count = iter(range(1 << 30))

    def meddle(pushes: Sequence[Push]) -> Sequence[Push]:
        if next(count) != chunk:
            return pushes
        (push,) = pushes
        data = np.frombuffer(bytearray(push.source), np.uint32)
        data[element] ^= 4
        return [Push(memoryview(data), push.key, push.offset)]

    return meddle


@pytest.mark.parametrize("chunk", [0, 3, 10])
def test_a_flipped_bit_is_found_and_named(pair: Pair, chunk: int) -> None:
    # Chunks are 32 tokens; of the last there are 13. Layer 2, v, head 0, token 11, dim 5.
    tokens = 32 if chunk < 10 else 13
    element = (((2 * 2 + 1) * 2 + 0) * tokens + 11) * 32 + 5
    pair.producer.transport.meddle = flip(chunk, element)
    ticket, _ = start(pair)
    reason = failed(pair)
    assert (reason.code, reason.field) == ("digest_mismatch", "digest")
    assert f"layer 2, v, head 0, tile 0 of tokens [{chunk * 32}, {chunk * 32 + tokens})" in reason.message
    assert reason.ours != reason.theirs
    sent, _ = pair.settle(ticket, "failed", "failed")
    assert sent is not None
    assert sent.reason is not None
    assert sent.reason.code == "digest_mismatch"
    pair.producer.transport.meddle = lambda pushes: pushes
    still_works(pair)


def test_a_wrong_chunk_is_never_scattered(pair: Pair) -> None:
    before = snapshot(pair)
    pair.producer.transport.meddle = flip(0, 0)
    ticket, _ = start(pair)
    failed(pair)
    pair.quiet()
    assert untouched(pair, before)
    assert pair.consumer.record(ticket).tokens == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(("policy", "verify", "every"), [("always", True, 1), ("sampled", True, 8), ("off", False, 1)])
def test_the_policy_of_the_configuration(policy: Literal["always", "sampled", "off"], verify: bool, every: int) -> None:
    made = Settings.of(KVSection(digest=policy))
    assert (made.verify, made.every) == (verify, every)


SAMPLED = {"every": 8, "chunk": 1 << 20, "staging": 4 << 20}


def first_of_layer(layer: int, token: int) -> int:
    """K, head 0, dim 0, in a chunk of all tokens."""
    return (layer * 4 * TOKENS + token) * 32


@pytest.mark.parametrize("offset", range(8))
def test_a_sampled_tile_is_verified_and_others_are_not(
    make: Make, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """Of layer 1, the tile 2 of K and head 0: its numbers add up to 3."""
    monkeypatch.setattr("deeplink.kvconnector.handoffs.consumer.secrets.randbelow", lambda every: offset)
    pair = make(producer=SAMPLED, consumer=SAMPLED)
    before = snapshot(pair)
    pair.producer.transport.meddle = flip(0, first_of_layer(1, 37))
    ticket, _ = start(pair)
    if offset == 5:
        reason = failed(pair)
        assert (reason.code, reason.field) == ("digest_mismatch", "digest")
        assert "layer 1, k, head 0, tile 2 " in reason.message
        pair.quiet()
        assert untouched(pair, before)
    else:
        assert pair.outcome().reason is None
        got, expected = read(pair.consumer.cache, THEIRS, 0, TOKENS), read(pair.producer.cache, OURS, 0, TOKENS)
        assert np.argwhere(got != expected).tolist() == [[1, 0, 0, 37, 0]]
        sent, loaded = pair.settle(ticket, "drained", "loaded")
        assert sent is not None
        assert loaded is not None
        assert sent.digest == loaded.digest != ""


def test_a_sample_is_another_for_every_load(make: Make) -> None:
    """What is wrong in one tile each time is found in the end."""
    pair = make(producer=SAMPLED, consumer=SAMPLED)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pair.producer.transport.meddle = flip(0, first_of_layer(1, 37))
        start(pair)
        outcome = pair.outcome()
        pair.quiet()
        if outcome.reason is not None:
            assert outcome.reason.code == "digest_mismatch"
            return
    raise AssertionError("never found")


def test_without_verification_a_flipped_bit_passes(make: Make) -> None:
    pair = make(consumer={"verify": False})
    pair.producer.transport.meddle = flip(0, 0)
    ticket, _ = start(pair)
    assert pair.outcome().reason is None
    got, expected = read(pair.consumer.cache, THEIRS, 0, TOKENS), read(pair.producer.cache, OURS, 0, TOKENS)
    assert np.argwhere(got != expected).tolist() == [[0, 0, 0, 0, 0]]
    pair.settle(ticket, "drained", "loaded")


# -- mistakes of the engine's side ---------------------------------------------------------------------------


def test_a_table_that_is_too_short_for_the_producer(pair: Pair) -> None:
    ticket, _ = pair.ticket()
    pair.open(ticket, TOKENS)
    with pytest.raises(LayoutError):
        pair.fill(ticket, OURS[:2], TOKENS)
    with pytest.raises(LayoutError):
        pair.fill(ticket, [*OURS[:5], 24], TOKENS)
    pair.producer.endpoint.producer.abort(ticket.handoff)
    pair.settle(ticket, "aborted", None)
    still_works(pair)


@pytest.mark.parametrize("table", [[3, 1], [3, 1, 24], [-1, 1, 2], []])
def test_a_wrong_table_for_the_consumer(pair: Pair, table: list[int]) -> None:
    ticket, text = pair.ticket()
    pair.open(ticket, TOKENS)
    pair.load(pair.order(ticket, text, table, TOKENS))
    pair.fill(ticket, OURS, TOKENS)
    assert failed(pair).code == "layout_error"
    pair.settle(ticket, "failed", "failed")
    still_works(pair)


def test_chunks_larger_than_the_consumers_staging(make: Make) -> None:
    pair = make(producer={"chunk": 8 * TILE}, consumer={"staging": 4 * TILE})
    ticket, _ = start(pair)
    reason = failed(pair)
    assert (reason.code, reason.field) == ("handoff_failed", "kv.staging")
    assert "kv.chunk" in reason.remedy
    pair.settle(ticket, "failed", "failed")


def test_staging_that_holds_no_tile_is_refused_at_start() -> None:
    with pytest.raises(ConfigError) as caught:
        make_side("prefill", "block token head (kv dim)", 64, staging=TILE - 1)
    assert (caught.value.field, caught.value.ours) == ("kv.staging", str(TILE - 1))


# -- a peer that does not keep to the protocol ---------------------------------------------------------------


def peer(pair: Pair, contract: Contract | None = None) -> ch.Channel:
    """A consumer played by the test, after both Hellos."""
    deadline = time.monotonic() + 10
    channel = ch.Channel.connect(pair.producer.endpoint.contract.ranks[0].channel, SECRET, deadline)
    ours = msgspec.msgpack.encode((WIRE_VERSION, contract or pair.consumer.endpoint.contract))
    channel.send(ch.Hello(ours), deadline)
    assert isinstance(channel.receive(deadline), ch.Hello)
    return channel


def claim(pair: Pair, **changes: object) -> tuple[ch.Channel, Ticket]:
    """The same, with an accepted claim on a full handoff."""
    ticket, text = pair.ticket(60)
    pair.open(ticket, TOKENS)
    pair.fill(ticket, OURS, TOKENS)
    channel = peer(pair)
    fields = {
        "ticket": text,
        "claim": b"claim",
        "prompt": b"prompt",
        "parts": (ch.Part(0, (0, 1, 2), (0, 2), 0, TOKENS),),
        "transport": "tcp",
        "address": pair.consumer.transport.address,
    }
    channel.send(ch.Claim(**{**fields, **changes}), time.monotonic() + 10)  # type: ignore[arg-type]
    assert isinstance(channel.receive(time.monotonic() + 10), ch.Accept)
    return channel, ticket


def last(channel: ch.Channel) -> Reason:
    """The Fail that the conversation ends with."""
    while not isinstance(message := channel.receive(time.monotonic() + 10), ch.Fail):
        assert isinstance(message, (ch.Chunk, ch.Sent))
    channel.close()
    return message.reason


@pytest.mark.parametrize(
    "message",
    [
        ch.Landed(5),
        ch.Landed(1),
        ch.Grant(99, b"key"),
        ch.Grant(AHEAD, bytes(16)),  # as no chunk has landed, this one was not announced
        ch.Sent(0),
        ch.Accept(),
        ch.Ask("x"),
        ch.Claim("", b"", b"", (), "", ""),
        ch.End(),
    ],
)
def test_a_consumer_out_of_turn(pair: Pair, message: ch.Message) -> None:
    channel, ticket = claim(pair)
    channel.send(message, time.monotonic() + 10)
    assert last(channel).code == "protocol_error"
    pair.settle(ticket, "failed", None)
    still_works(pair)


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("127.0.0.1:1", "peer_gone"),
        ("nowhere", "protocol_error"),
        ("a" * 300 + ":1", "peer_gone"),
        ("..:1", "peer_gone"),
    ],
)
def test_a_consumer_at_an_address_nobody_is_at(pair: Pair, address: str, code: str) -> None:
    channel, ticket = claim(pair, address=address)
    assert last(channel).code == code
    pair.settle(ticket, "failed", None)
    still_works(pair)


@pytest.mark.parametrize("key", [b"", b"short", bytes(16), b"x" * 64])
def test_a_key_nobody_gave_out(pair: Pair, key: bytes) -> None:
    channel, ticket = claim(pair)
    channel.send(ch.Grant(0, key), time.monotonic() + 10)
    assert last(channel).field == "region"
    pair.settle(ticket, "failed", None)
    still_works(pair)


def test_a_consumer_that_says_landed_without_having_been_sent_anything(pair: Pair) -> None:
    """Its loss: the producer may forget what it says it has."""
    channel, ticket = claim(pair)
    deadline = time.monotonic() + 10
    while not isinstance(message := channel.receive(deadline), ch.End):
        assert isinstance(message, ch.Chunk)
        channel.send(ch.Landed(message.index), deadline)
    channel.close()
    pair.settle(ticket, "drained", None)


def test_a_consumer_that_leaves_without_a_word(pair: Pair) -> None:
    channel, ticket = claim(pair)
    channel.receive(time.monotonic() + 10)
    channel.close()
    sent, _ = pair.settle(ticket, "failed", None)
    assert sent is not None
    assert sent.reason is not None
    assert sent.reason.code == "peer_gone"
    still_works(pair)


@pytest.mark.parametrize(
    "first", [ch.Accept(), ch.Claim("", b"", b"", (), "", ""), ch.Hello(b"garbage"), ch.Hello(b"")]
)
def test_a_conversation_that_begins_wrong(pair: Pair, first: ch.Message) -> None:
    channel = ch.Channel.connect(pair.producer.endpoint.contract.ranks[0].channel, SECRET, time.monotonic() + 10)
    channel.send(first, time.monotonic() + 10)
    assert last(channel).code == "protocol_error"


def producer_says(pair: Pair, *messages: ch.Message) -> Reason:
    """What the consumer makes of a producer that answers its claim with these messages."""

    def serve(channel: ch.Channel, *_: object) -> None:
        deadline = time.monotonic() + 10
        for message in messages:
            channel.send(message, deadline)
        while True:
            received = channel.receive(deadline)
            if isinstance(received, ch.Quit):
                said.append(received.reason)

    said: list[Reason] = []
    pair.producer.endpoint.producer.serve = serve  # type: ignore[method-assign, assignment]
    before = snapshot(pair)
    ticket, text = pair.ticket()
    pair.load(pair.order(ticket, text, THEIRS, TOKENS))
    reason = failed(pair)
    pair.settle(ticket, None, "failed")
    assert untouched(pair, before)
    eventually(lambda: not pair.producer.endpoint._listener._open)
    if reason.code == "protocol_error" and messages and isinstance(messages[0], ch.Accept):
        assert said == [reason]
    return reason


def chunk(start: int, stop: int, index: int = 0, length: int | None = None, digests: bytes = b"") -> ch.Chunk:
    return ch.Chunk(index, 0, start, stop, (stop - start) * 1536 if length is None else length, digests)


@pytest.mark.parametrize(
    "messages",
    [
        [ch.End()],
        [ch.Accept(), ch.End()],
        [ch.Accept(), ch.Accept()],
        [ch.Accept(), ch.Sent(0)],
        [ch.Accept(), ch.Landed(0)],
        [ch.Accept(), chunk(16, 32)],
        [ch.Accept(), chunk(0, 0, length=0)],
        [ch.Accept(), ch.Chunk(0, 0, 32, 16, 100, b"")],
        [ch.Accept(), chunk(0, 16, length=100)],
        [ch.Accept(), chunk(0, 16), chunk(16, 32)],
        [ch.Accept(), chunk(0, 16), chunk(32, 48, 1)],
        [ch.Accept(), chunk(0, 16), chunk(0, 16, 1)],
        [ch.Accept(), chunk(0, 16, digests=b"1234567")],
        [ch.Accept(), chunk(0, 16), ch.End()],
        [ch.Accept(), chunk(0, 16), ch.Sent(1)],
        [ch.Accept(), ch.Chunk(0, 1, 0, 16, 16 * 1536, b"")],
    ],
)
def test_a_producer_out_of_turn(pair: Pair, messages: list[ch.Message]) -> None:
    assert producer_says(pair, *messages).code == "protocol_error"


@pytest.mark.parametrize("digests", [b"", bytes(8), bytes(8 * 13)])
def test_a_chunk_with_another_number_of_digests(pair: Pair, digests: bytes) -> None:
    reason = producer_says(pair, ch.Accept(), chunk(0, 16, digests=digests), ch.Sent(0))
    assert (reason.code, reason.field) == ("digest_mismatch", "digest")


def test_a_producers_failure_is_passed_on_as_it_is(pair: Pair) -> None:
    told = Reason("prefill_failed", "message", "field", "ours", "theirs", "remedy")
    assert producer_says(pair, ch.Accept(), ch.Fail(told)) == told
    assert producer_says(pair, ch.Fail(told)) == told


def test_a_kept_connection_that_has_died_is_replaced(pair: Pair) -> None:
    still_works(pair)
    for end in list(pair.producer.endpoint._listener._open):
        end.shutdown(2)
    eventually(lambda: not pair.producer.endpoint._listener._open)
    still_works(pair)


def test_connecting_does_not_wait_for_the_whole_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process still has its port; the kernel takes the connection, and nobody answers."""
    import socket

    monkeypatch.setattr(consumer_module, "DIAL_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        ticket, text = pair.ticket(60, channels=(f"127.0.0.1:{deaf.getsockname()[1]}",))
        pair.load(pair.order(ticket, text, THEIRS, TOKENS))
        assert failed(pair).code == "deadline_exceeded"
    pair.settle(ticket, None, "failed")

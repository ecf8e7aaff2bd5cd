"""What the router relies on when it offers a staged cache to another decode engine, held against a real producer."""

from __future__ import annotations

from loopback import NHD, Pair, make_pair, make_side

from deeplink.kvconnector.relayout import compiled


def test_a_second_ticket_under_the_same_id_lets_another_engine_claim_what_nobody_has() -> None:
    compiled.warm()  # seconds, which are not those that a load has
    first = make_pair()
    other = Pair(first.producer, make_side("decode", NHD, 16, seed=3))
    try:
        ticket, text = first.ticket()
        first.open(ticket, 100)
        first.fill(ticket, [0, 1], 100)
        again, other_text = other.ticket(handoff=ticket.handoff)
        other.load(other.order(again, other_text, list(range(7)), 100))
        assert other.outcome().reason is None
        other.settle(again, "drained", "loaded")
        # The claim is used up now.
        first.load(first.order(ticket, text, [0], 100))
        reason = first.outcome().reason
        assert reason is not None
        assert reason.code == "ticket_refused"
    finally:
        first.close()
        other.consumer.endpoint.close()

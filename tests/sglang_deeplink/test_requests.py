"""Requests of SGLang's two kinds of engines, through every phase, on real endpoints and without SGLang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import stand_in
from loopback import SECRET, Pair, make_pair

from deeplink.errors import DeeplinkError

stand_in.install()

from sglang_deeplink import rooms  # noqa: E402
from sglang_deeplink.receiver import DeepLinkKVReceiver  # noqa: E402
from sglang_deeplink.sender import DeepLinkKVSender  # noqa: E402

TOKENS = 200
FAILED, WAITING, TRANSFERRING, SUCCESS = 0, 2, 3, 4


@dataclass
class Stage:
    pair: Pair
    prefill: Any
    decode: Any

    def tickets(self, seconds: float = 10.0) -> tuple[str, str, str]:
        """The handoff's name, and the hosts that the two engines' requests come with."""
        ticket, text = self.pair.ticket(seconds)
        return ticket.handoff, f"deeplink-produce-{text}", f"deeplink-consume-{text}"

    def sender(self, host: str | None, **fields: object) -> Any:
        made = DeepLinkKVSender(self.prefill, "", 1)
        made.bind(stand_in.request(TOKENS, host, **fields))
        return made

    def receiver(self, host: str | None, **fields: object) -> Any:
        made = DeepLinkKVReceiver(self.decode, "", 1)
        made.bind(stand_in.request(TOKENS, host, **fields))
        made.init(0)
        return made

    def pages(self, side: str) -> np.ndarray[Any, Any]:
        size = self.prefill.page_size if side == "prefill" else self.decode.page_size
        return np.arange(-(-TOKENS // size), dtype=np.int32)

    def send_all(self, sender: Any) -> None:
        """In two chunks, the first of whole pages."""
        pages, size = self.pages("prefill"), self.prefill.page_size
        sender.init(len(pages), 0)
        sender.send(pages[:2], num_kv_tokens=2 * size)
        sender.send(pages[2:], num_kv_tokens=TOKENS - 2 * size)

    def states(self) -> dict[str, str]:
        sides = {"producer": self.pair.producer, "consumer": self.pair.consumer}
        return {name: str(dict(side.endpoint._ledger.ended_by_state)) for name, side in sides.items()}


@pytest.fixture
def stage() -> Iterator[Stage]:
    pair = make_pair()
    sizes = (side.cache.bound.block_size for side in (pair.producer, pair.consumer))
    managers = (
        stand_in.manager(side, size, SECRET) for side, size in zip((pair.producer, pair.consumer), sizes, strict=True)
    )
    yield Stage(pair, *managers)
    pair.close()


def until(one: Any, *wanted: int, seconds: float = 10.0) -> int:
    end = time.monotonic() + seconds
    while (state := int(one.poll())) not in wanted:
        assert time.monotonic() < end, state
        time.sleep(0.002)
    return state


def why(one: Any) -> DeeplinkError:
    with pytest.raises(DeeplinkError) as raised:
        one.failure_exception()
    return raised.value


def test_a_request_goes_from_one_engine_to_the_other(stage: Stage) -> None:
    _, produce, consume = stage.tickets()
    sender, receiver = stage.sender(produce), stage.receiver(consume)
    assert (sender.poll(), receiver.poll()) == (WAITING, WAITING)
    receiver.send_metadata(stage.pages("decode"), 2, None, 0)
    stage.send_all(sender)
    assert until(sender, SUCCESS, FAILED) == SUCCESS
    assert until(receiver, SUCCESS, FAILED) == SUCCESS
    buffers = stage.decode.buffers
    assert buffers.output_ids.array[2, 0] == 17
    assert buffers.bootstrap_room.array[2, 0] == receiver._req.bootstrap_room > 1
    stage.pair.quiet()


def test_prefill_is_done_before_anyone_has_asked(stage: Stage) -> None:
    _, produce, consume = stage.tickets()
    sender = stage.sender(produce)
    stage.send_all(sender)
    assert until(sender, SUCCESS, FAILED) == SUCCESS
    receiver = stage.receiver(consume)
    receiver.send_metadata(stage.pages("decode"), 0, None, 0)
    assert until(receiver, SUCCESS, FAILED) == SUCCESS
    stage.pair.quiet()


@pytest.mark.parametrize("host", [None, "127.0.0.1", "deeplink-produce-x", "deeplink-consume-x"])
def test_without_a_ticket_a_request_fails_and_no_other(stage: Stage, host: str | None) -> None:
    for bad in (stage.sender(host), stage.receiver(host)):
        assert bad.poll() == FAILED
        assert why(bad).code == "ticket_refused"
        bad.abort()
    receiver = stage.receiver(host)
    receiver.send_metadata(stage.pages("decode"), 0, None, 0)
    assert receiver.poll() == FAILED
    stage.pair.quiet()
    test_a_request_goes_from_one_engine_to_the_other(stage)


def test_a_ticket_is_good_for_one_request(stage: Stage) -> None:
    _, produce, _ = stage.tickets()
    first, second = stage.sender(produce), stage.sender(produce)
    assert (first.poll(), second.poll()) == (WAITING, FAILED)
    first.abort()
    assert first.poll() == FAILED
    assert why(first).code == "aborted"


def test_one_for_an_engine_that_was_restarted_since(stage: Stage) -> None:
    _, _, consume = stage.tickets()
    stage.decode.epoch = "another"
    receiver = stage.receiver(consume)
    assert receiver.poll() == FAILED
    assert why(receiver).field == "epoch"


@pytest.mark.parametrize("sent", [False, True])
def test_a_prefill_request_is_given_up(stage: Stage, sent: bool) -> None:
    name, produce, consume = stage.tickets()
    sender, receiver = stage.sender(produce), stage.receiver(consume)
    receiver.send_metadata(stage.pages("decode"), 0, None, 0)
    if sent:
        sender.send(stage.pages("prefill")[:2], num_kv_tokens=2 * stage.prefill.page_size)
    sender.abort()
    assert until(sender, FAILED) == FAILED
    assert until(receiver, SUCCESS, FAILED) == FAILED
    assert why(receiver).code == "aborted"
    stage.pair.quiet()
    record = stage.pair.producer.endpoint.record(name)
    assert record is not None
    assert record.state == "aborted"


@pytest.mark.parametrize("how", ["abort", "clear"])
@pytest.mark.parametrize("phase", ["before its pages", "loading", "loaded"])
def test_a_decode_request_is_given_up(stage: Stage, phase: str, how: str) -> None:
    _, produce, consume = stage.tickets()
    sender, receiver = stage.sender(produce), stage.receiver(consume)
    if phase != "before its pages":
        receiver.send_metadata(stage.pages("decode"), 0, None, 0)
    if phase == "loaded":
        stage.send_all(sender)
        assert until(receiver, SUCCESS, FAILED) == SUCCESS
    getattr(receiver, how)()
    if phase == "loaded":
        assert receiver.poll() == SUCCESS
    else:
        assert receiver.poll() == FAILED
        assert why(receiver).code == "aborted"
        sender.abort()
    stage.pair.quiet()
    assert stage.decode._outcomes == {}


def test_pages_that_do_not_come_in_time(stage: Stage) -> None:
    _, _, consume = stage.tickets(0.2)
    receiver = stage.receiver(consume)
    assert until(receiver, FAILED, SUCCESS) == FAILED
    assert why(receiver).code == "deadline_exceeded"


def test_a_prefill_that_does_not_come_in_time(stage: Stage) -> None:
    _, produce, consume = stage.tickets(0.4)
    sender, receiver = stage.sender(produce), stage.receiver(consume)
    receiver.send_metadata(stage.pages("decode"), 0, None, 0)
    assert until(receiver, SUCCESS, FAILED) == FAILED
    assert until(sender, FAILED) == FAILED
    assert why(receiver).code == why(sender).code == "deadline_exceeded"
    stage.pair.quiet()


def test_another_prompt_is_refused_by_name(stage: Stage) -> None:
    _, produce, consume = stage.tickets()
    sender = stage.sender(produce)
    stage.send_all(sender)
    receiver = stage.receiver(consume, origin_input_ids=list(range(1, TOKENS + 1)))
    receiver.send_metadata(stage.pages("decode"), 0, None, 0)
    assert until(receiver, SUCCESS, FAILED) == FAILED
    assert why(receiver).field == "prompt"
    stage.pair.quiet()


def test_scores_of_the_first_token_that_did_not_come_are_refused(stage: Stage) -> None:
    from types import SimpleNamespace

    _, produce, consume = stage.tickets()
    sender = stage.sender(produce)
    stage.send_all(sender)
    scores = SimpleNamespace(top_logprobs_num=1)
    receiver = stage.receiver(consume, return_logprob=True, logprob=scores)
    receiver.send_metadata(stage.pages("decode"), 0, None, 0)
    assert until(receiver, SUCCESS, FAILED) == FAILED
    assert why(receiver).field == "logprobs"
    stage.pair.quiet()


def test_a_request_that_cannot_be_handed_over_is_refused_by_name(stage: Stage) -> None:
    _, produce, consume = stage.tickets()
    for bad in (stage.sender(produce, lora_id="a"), stage.receiver(consume, lora_id="a")):
        assert bad.poll() == FAILED
        assert why(bad).field == "lora"


def test_only_what_is_missing_is_loaded(stage: Stage) -> None:
    """A decode engine that has the prompt's first page already."""
    name, produce, consume = stage.tickets()
    sender, receiver = stage.sender(produce), stage.receiver(consume)
    stage.send_all(sender)
    size = stage.decode.page_size
    receiver.send_metadata(stage.pages("decode")[1:], 0, None, size)
    assert until(receiver, SUCCESS, FAILED) == SUCCESS
    stage.pair.quiet()
    record = stage.pair.consumer.endpoint.record(name)
    assert record is not None
    assert record.tokens == TOKENS - size


# -- paired by another router ---------------------------------------------------------------------------------


def foreign(stage: Stage, seconds: float) -> dict[str, object]:
    """What another router puts into both engines' requests."""
    stage.prefill.foreign_seconds = stage.decode.foreign_seconds = seconds
    sock = rooms.listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    stage.pair.producer.endpoint.listen(sock)
    return {"bootstrap_port": port, "bootstrap_room": 4711}


def test_a_room_instead_of_a_ticket(stage: Stage) -> None:
    fields = foreign(stage, 10)
    receiver, sender = stage.receiver("127.0.0.1", **fields), stage.sender("127.0.0.1", **fields)
    assert until(receiver, WAITING, FAILED) == WAITING
    receiver.send_metadata(stage.pages("decode"), 1, None, 0)
    stage.send_all(sender)
    assert until(sender, SUCCESS, FAILED) == SUCCESS
    assert until(receiver, SUCCESS, FAILED) == SUCCESS
    stage.pair.quiet()
    again = stage.sender("127.0.0.1", **fields)
    assert (again.poll(), why(again).field) == (FAILED, "handoff")


def test_a_room_nobody_else_comes_to(stage: Stage) -> None:
    fields = foreign(stage, 0.4)
    receiver = stage.receiver("127.0.0.1", **fields)
    assert until(receiver, WAITING, FAILED) == WAITING
    receiver.send_metadata(stage.pages("decode"), 1, None, 0)
    assert until(receiver, SUCCESS, FAILED) == FAILED
    assert why(receiver).code == "deadline_exceeded"
    sender = stage.sender("127.0.0.1", **{**fields, "bootstrap_room": 4712})
    stage.send_all(sender)
    assert until(sender, SUCCESS, FAILED) == SUCCESS
    stage.pair.quiet()


def test_a_prefill_engine_that_is_not_there(stage: Stage) -> None:
    fields = foreign(stage, 0.4)
    receiver = stage.receiver("127.0.0.1", **{**fields, "bootstrap_port": 1})
    assert until(receiver, WAITING, FAILED) == FAILED
    assert why(receiver).code in ("peer_gone", "deadline_exceeded")


def test_a_room_that_is_left_while_the_prefill_engine_is_called(stage: Stage) -> None:
    fields = foreign(stage, 5)
    receiver = stage.receiver("127.0.0.1", **fields)
    receiver.abort()
    assert receiver.poll() == FAILED
    assert why(receiver).code == "aborted"
    stage.pair.quiet()


def test_pages_that_are_too_few_fail_the_request_alone(stage: Stage) -> None:
    _, produce, consume = stage.tickets()
    sender, receiver = stage.sender(produce), stage.receiver(consume)
    receiver.send_metadata(stage.pages("decode"), 0, None, 0)
    sender.send(stage.pages("prefill")[:1], num_kv_tokens=TOKENS)
    assert sender.poll() == FAILED
    assert why(sender).code == "layout_error"
    assert until(receiver, SUCCESS, FAILED) == FAILED
    stage.pair.quiet()

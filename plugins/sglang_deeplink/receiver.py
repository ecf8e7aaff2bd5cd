"""One request of a decode engine: its pages are filled with what a prefill engine has staged.

SGLang gives it pages and polls it from its scheduler's loop. Until `poll` says that the load has ended, or `abort` has
returned, the pages are the consumer's.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll, KVTransferDestination
from sglang.srt.utils.network import NetworkAddress

from deeplink.errors import Aborted, DeadlineExceeded, DeeplinkError, HandoffError, TicketRefused
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.order import Order
from deeplink.kvconnector.handoffs.ticket import Ticket
from sglang_deeplink import passage, prompt, results
from sglang_deeplink.process import DeepLinkKVManager
from sglang_deeplink.rooms import Meeting

log = logging.getLogger("sglang.deeplink")


class DeepLinkKVReceiver(BaseKVReceiver):
    # What SGLang's scheduler asks of a receiver beyond its base class.
    require_staging = False
    abort_notified = False
    conclude_state = None

    def __init__(self, mgr: DeepLinkKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_infos: list[Any] = []
        self._text = ""
        self._ticket: Ticket | None = None
        self._failure: DeeplinkError | None = None
        self._meeting: Meeting | None = None
        self._loading = False
        self._loaded = False

    def bind(self, req: Any) -> None:
        """Look at the ticket. What is wrong with it fails this request and no other."""
        self._req = req
        try:
            self._prompt = prompt.identity(req)
            text = passage.read(req.bootstrap_host, "consume")
            if text is None:
                self._meet(req)
                return
            self._take(tickets.verify(text, self.kv_mgr.secret), text)
        except DeeplinkError as exc:
            self._fail(exc)

    def _meet(self, req: Any) -> None:
        """Another router has paired the request: the prefill engine is asked for what would be in the ticket."""
        if not self.kv_mgr.foreign_seconds or not req.bootstrap_host:
            raise _no_ticket()
        until = time.monotonic() + self.kv_mgr.foreign_seconds
        address = NetworkAddress(req.bootstrap_host, req.bootstrap_port).to_host_port_str()
        self._meeting = Meeting(self.kv_mgr.endpoint, self.kv_mgr.secret, address, req.bootstrap_room, until)
        self._meeting.start()

    def _take(self, ticket: Ticket, text: str) -> None:
        self._ticket, self._text = ticket, text
        if ticket.consumer != self.kv_mgr.epoch:
            raise tickets.other_epoch(self.kv_mgr.epoch, ticket.consumer)
        self._deadline = time.monotonic() + ticket.milliseconds / 1000
        self._req.bootstrap_room = passage.room(ticket.handoff)

    def _met(self) -> bool:
        """False as long as the meeting goes on."""
        meeting = self._meeting
        if meeting is None or not meeting.over:
            return meeting is None
        self._meeting = None
        if meeting.ticket is None or meeting.failure is not None:
            self._fail(meeting.failure or HandoffError("the prefill engine could not be called"))
        else:
            self._take(meeting.ticket, meeting.text)
        return True

    def init(self, prefill_dp_rank: int) -> None:
        """Which rank of the prefill engine it is about is in the ticket."""

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        """SGLang has the pages: those of the prompt's tokens from `decode_prefix_len` on, a whole number of pages."""
        if self._ticket is None or self._failure is not None:
            return
        assert aux_index is not None  # SGLang gives a decode request its row with its pages
        start = decode_prefix_len or 0
        self._row = aux_index
        self._loading = True
        # Pages before the first that is loaded are never looked at.
        table = [0] * (start // self.kv_mgr.page_size) + kv_indices.tolist()
        stop = len(self._req.origin_input_ids)
        self.kv_mgr.load(
            Order(self._req.rid, self._ticket, self._text, self._prompt, start, stop, (table,), first=True)
        )

    def poll(self) -> Any:
        if self._failure is None and not self._met():
            return KVPoll.Bootstrapping
        if self._failure is not None or self._ticket is None:
            return KVPoll.Failed
        if self._loaded:
            return KVPoll.Success
        if not self._loading:
            if time.monotonic() < self._deadline:
                return KVPoll.WaitingForInput
            self._fail(DeadlineExceeded("there were no pages for the prompt before the ticket's deadline"))
            return KVPoll.Failed
        outcome = self.kv_mgr.outcome(self._ticket.handoff)
        if outcome is None:
            return KVPoll.Transferring
        if outcome.reason is not None:
            self._fail(DeeplinkError.from_reason(outcome.reason))
            return KVPoll.Failed
        assert outcome.first is not None
        buffers = self.kv_mgr.buffers
        try:
            results.check(self._req, outcome.first, buffers.output_top_logprobs_val.shape[1])
        except DeeplinkError as exc:
            self._fail(exc)
            return KVPoll.Failed
        results.put(buffers, self._row, self._req.bootstrap_room, self._req, outcome.first)
        self._loaded = True
        return KVPoll.Success

    def failure_exception(self) -> None:
        raise self._failure if self._failure is not None else DeeplinkError("the request was not bound to a handoff")

    def abort(self) -> None:
        """When this returns nothing is written to the request's pages any more."""
        if self._failure is not None or self._loaded:
            return
        if self._loading and self._ticket is not None:
            self.kv_mgr.endpoint.consumer.cancel(self._ticket.handoff, self._req.rid)
            self.kv_mgr.forget(self._ticket.handoff)
            self._failure = Aborted("the decode request was given up")
        else:
            self._fail(Aborted("the decode request was given up"))

    def clear(self) -> None:
        """SGLang is done with it; should it not be over, it is now."""
        self.abort()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nothing is held back after an abort: no peer writes into the pages."""

    def _fail(self, why: DeeplinkError) -> None:
        log.warning("deeplink: request %s fails: %s", self._req.rid, why)
        self._failure = why
        if self._ticket is not None and not self._loading:
            self.kv_mgr.endpoint.refuse(self._ticket.handoff, why.reason())


def _no_ticket() -> TicketRefused:
    return TicketRefused(
        "the request came without a ticket, so there is nothing to go on from",
        field="ticket",
        ours="one of deeplink's router",
        theirs="none",
        remedy="send requests through deeplink's router, or set kv.foreign_seconds for SGLang's own",
    )

"""One request of a prefill engine: its pages are staged as SGLang reports them written, and then are SGLang's again.

SGLang polls it from its scheduler's loop. A request is done when all of it is staged, whoever fetches it when.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVSender, KVPoll, KVTransferMetric

from deeplink.errors import DeeplinkError, TicketRefused
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.handoff import FINAL
from deeplink.kvconnector.handoffs.ticket import Ticket
from sglang_deeplink import passage, prompt, results, rooms
from sglang_deeplink.process import DeepLinkKVManager

log = logging.getLogger("sglang.deeplink")


class DeepLinkKVSender(BaseKVSender):
    conclude_state = None

    def __init__(
        self,
        mgr: DeepLinkKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self._ticket: Ticket | None = None
        self._failure: DeeplinkError | None = None
        self._pages: list[int] = []
        self._computed = 0

    def bind(self, req: Any) -> None:
        """Open the handoff. What is wrong with it fails this request and no other."""
        self._req = req
        self._tokens = len(req.origin_input_ids)
        try:
            ticket = self._read(req)
            self.kv_mgr.endpoint.producer.open(ticket, prompt.identity(req), self._tokens)
        except DeeplinkError as exc:
            log.warning("deeplink: request %s is not handed over: %s", req.rid, exc)
            self._failure = exc
            return
        self._ticket = ticket
        req.bootstrap_room = passage.room(ticket.handoff)

    def _read(self, req: Any) -> Ticket:
        text = passage.read(req.bootstrap_host, "produce")
        if text is not None:
            return tickets.verify(text, self.kv_mgr.secret)
        if not self.kv_mgr.foreign_seconds:
            raise _no_ticket()
        return rooms.to_fill(req.bootstrap_room, self.kv_mgr.endpoint, self.kv_mgr.foreign_seconds)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """SGLang's place for the first token; it is taken from the request itself."""

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None) -> None:
        """`kv_indices` are the next pages of the prompt, with `num_kv_tokens` tokens in them."""
        if self._ticket is None:
            return
        producer, name = self.kv_mgr.endpoint.producer, self._ticket.handoff
        self._pages += kv_indices.tolist()
        self._computed += num_kv_tokens or 0
        try:
            if self._computed >= self._tokens:
                producer.conclude(name, results.taken(self._req))
            producer.fill(name, (self._pages,), self._computed)
        except DeeplinkError as exc:
            self._failure = exc
            producer.abort(name, exc.reason())

    def poll(self) -> Any:
        if self._failure is None and self._ticket is not None:
            record = self.kv_mgr.endpoint.record(self._ticket.handoff)
            if record is not None and record.state in FINAL and record.reason is not None:
                self._failure = DeeplinkError.from_reason(record.reason)
        if self._failure is not None or self._ticket is None:
            return KVPoll.Failed
        if self._computed < self._tokens:
            return KVPoll.WaitingForInput
        producer = self.kv_mgr.endpoint.producer
        producer.pump()
        return KVPoll.Success if producer.settled(self._ticket.handoff) else KVPoll.Transferring

    def poll_pp_consensus(self) -> Any:
        return self.poll()

    def get_transfer_metric(self) -> KVTransferMetric:
        """Nothing: what is transferred when is told by deeplink's own metrics."""
        return KVTransferMetric()

    def failure_exception(self) -> None:
        raise self._failure if self._failure is not None else DeeplinkError("the request was not bound to a handoff")

    def abort(self) -> None:
        if self._ticket is not None and self._failure is None:
            self.kv_mgr.endpoint.producer.abort(self._ticket.handoff)


def _no_ticket() -> TicketRefused:
    return TicketRefused(
        "the request came without a ticket, so nobody may fetch its cache",
        field="ticket",
        ours="one of deeplink's router",
        theirs="none",
        remedy="send requests through deeplink's router, or set kv.foreign_seconds for SGLang's own",
    )

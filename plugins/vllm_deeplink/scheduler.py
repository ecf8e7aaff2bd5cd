"""The half in the engine-core process: which request hands over what, and to which blocks.

It holds no cache. What it decides goes to the worker half as `Orders`, once per step; what the worker finds out comes
back through vLLM's own lists of finished and failed transfers.

    producing   the request's KV is offered. Its blocks stay until the worker says that all of it is staged, which is
                at the latest one step after prefill ends, unless staging is full.
    consuming   the request's KV is loaded. vLLM parks the request and keeps its blocks until the worker reports it. One
                that is asked for while prefill may not have begun is put off before it has any (`early`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from deeplink.errors import DeeplinkError, Refused, TicketRefused
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.first_token import FirstToken
from deeplink.kvconnector.handoffs.order import Order
from deeplink.kvconnector.handoffs.ticket import Ticket
from vllm_deeplink.early import EarlyClaims
from vllm_deeplink.identity import identity
from vllm_deeplink.orders import Deny, Fill, Open, Orders, Withhold
from vllm_deeplink.stats import DeepLinkStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

PARAMETER = "deeplink"


@dataclass(slots=True)
class _Producing:
    ticket: Ticket
    prompt: bytes
    tokens: int
    tables: list[list[int]] = field(default_factory=list)
    opened: bool = False
    filled: bool = False


@dataclass(slots=True)
class _Consuming:
    """`until` is the deadline of the ticket, of time.monotonic(); `early` says that prefill may not have ended when the
    claim was asked for."""

    order: Order | None
    denial: DeeplinkError | None
    handoff: str | None
    until: float = 0.0
    early: bool = False
    computed: int = 0
    phase: Literal["new", "matched", "loading", "done"] = "new"


class SchedulerHalf:
    def __init__(self, secret: bytes, epoch: str, early: EarlyClaims) -> None:
        self._secret = secret
        self._epoch = epoch
        self._early = early
        self._producing: dict[str, _Producing] = {}
        self._consuming: dict[str, _Consuming] = {}
        self._orders = Orders()
        self._held: dict[str, int] = {}
        self._told = 0
        self._withdrawn: DeeplinkError | None = None

    def withdraw(self, why: DeeplinkError) -> None:
        """Offer and load nothing from now on. What is under way is given up, but for prompts that are prefilled."""
        self._withdrawn = why
        for name, producing in list(self._producing.items()):
            if not producing.opened:
                del self._producing[name]
                self._orders.withheld.append(Withhold(producing.ticket.handoff, why.reason()))
            elif not producing.filled:
                self._orders.aborts.append(producing.ticket.handoff)
        for consuming in self._consuming.values():
            if consuming.phase in ("new", "matched"):
                consuming.denial = consuming.denial or why
            elif consuming.phase == "loading" and consuming.order is not None and consuming.denial is None:
                self._orders.cancels.append(consuming.order)

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond the `computed` ones come from outside, and whether they come asynchronously. None: ask
        again, as it is too early to say; the request has no blocks until then.

        vLLM asks whenever it is about to admit a request: at first, and again after a preemption or a failed load.
        A handoff is tried once; after that the request is computed here like any other.
        """
        consuming = self._consuming_of(request)
        if consuming is None or consuming.phase not in ("new", "matched"):
            self._note_producer(request)
            return 0, False
        # The last prompt token is computed here in any case: it is what the first new token is sampled from.
        missing = request.num_prompt_tokens - 1 - computed
        if missing <= 0 and consuming.denial is None:
            self._need_nothing(request.request_id, consuming)
            return 0, False
        if consuming.early and consuming.denial is None:
            assert consuming.order is not None
            ticket, tokens = consuming.order.ticket, request.num_prompt_tokens
            if not self._early.due(request.request_id, ticket, consuming.until, tokens):
                return None, False
        consuming.phase, consuming.computed = "matched", computed
        # A request that is to be denied must have something to wait for, or vLLM would not park it.
        return max(missing, 1), True

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has given the request its blocks; `external` of its tokens are to be loaded into them."""
        consuming = self._consuming.get(request.request_id)
        if consuming is None or consuming.phase != "matched":
            return
        if external == 0:
            # Another connector beside this one loads the prompt, or vLLM computes it. Nobody would come for it later.
            self._need_nothing(request.request_id, consuming)
            return
        consuming.phase = "loading"
        tables = tuple(map(tuple, blocks.get_block_ids()))
        self._held[request.request_id] = sum(map(len, tables))
        if consuming.denial is not None:
            deny = Deny(request.request_id, consuming.handoff, consuming.denial.reason(), consuming.computed, tables)
            self._orders.denies.append(deny)
            return
        assert consuming.order is not None
        stop = request.num_prompt_tokens - 1
        # It may have been put off, and the deadline is that of the ticket as it was read.
        left = max(1, int((consuming.until - time.monotonic()) * 1000))
        ticket = msgspec.structs.replace(consuming.order.ticket, milliseconds=left)
        consuming.order = replace(consuming.order, ticket=ticket, start=stop - external, stop=stop, tables=tables)
        self._orders.loads.append(consuming.order)

    def step(self, output: SchedulerOutput) -> Orders:
        """The orders for the step that `output` describes."""
        for name in output.preempted_req_ids or ():
            if (producing := self._producing.get(name)) is not None:
                producing.tables, producing.filled = [], False
                self._orders.lost.append(producing.ticket.handoff)
                if self._withdrawn is not None:
                    self._orders.aborts.append(producing.ticket.handoff)
        for new in output.scheduled_new_reqs:
            if (producing := self._producing.get(new.req_id)) is not None:
                producing.tables = [list(blocks) for blocks in new.block_ids]
                self._fill(new.req_id, producing, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (producing := self._producing.get(name)) is not None:
                if name in cached.resumed_req_ids or not producing.tables:
                    producing.tables = [[] for _ in blocks or ()]
                for table, more in zip(producing.tables, blocks or (), strict=False):
                    table += more
                self._fill(name, producing, computed, output)
        orders, self._orders = self._orders, Orders()
        return orders

    def finished(self, request: Request) -> bool:
        """The request is over. True: vLLM keeps its blocks until the worker reports them sent."""
        from vllm.v1.request import RequestStatus

        consuming = self._consuming.pop(request.request_id, None)
        if consuming is not None and consuming.order is not None:
            if consuming.phase == "loading":
                # Late for a load that has ended, which the worker then ignores.
                self._orders.cancels.append(consuming.order)
            self._early.over(request.request_id, consuming.order.ticket)
        producing = self._producing.pop(request.request_id, None)
        if producing is None or not producing.opened:
            return False
        if request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            self._orders.aborts.append(producing.ticket.handoff)
        elif request.output_token_ids:
            # For engines that go on from the whole prompt; another vLLM computes its last token itself.
            self._orders.firsts.append((producing.ticket.handoff, FirstToken(request.output_token_ids[0])))
        self._held[request.request_id] = sum(map(len, producing.tables))
        return True

    def reported(self, output: KVConnectorOutput) -> None:
        """The workers have told what they are done with: vLLM frees those blocks, or runs their requests."""
        for name in (output.finished_sending or set()) | (output.finished_recving or set()):
            self._held.pop(name, None)
            self._early.over(name)

    def stats(self) -> DeepLinkStats | None:
        """How many blocks handoffs hold, if that has changed."""
        held = sum(self._held.values())
        if held == self._told:
            return None
        self._told = held
        return DeepLinkStats.of(blocks=held)

    def _fill(self, name: str, producing: _Producing, computed: int, output: SchedulerOutput) -> None:
        if producing.filled or self._withdrawn is not None:
            return
        if not producing.opened:
            producing.opened = True
            self._orders.opens.append(Open(name, producing.ticket, producing.prompt, producing.tokens))
        # Not cut off at the prompt's end: a state is that after all that was computed, and after nothing less.
        after = computed + output.num_scheduled_tokens[name]
        producing.filled = after >= producing.tokens
        self._orders.fills.append(Fill(name, producing.ticket.handoff, tuple(map(tuple, producing.tables)), after))

    def _need_nothing(self, name: str, consuming: _Consuming) -> None:
        """Let the producer go, unless the handoff was refused here, which has loaded nothing and never will."""
        consuming.phase = "done"
        if consuming.order is not None:
            self._early.over(name, consuming.order.ticket)
            if consuming.denial is None:
                self._orders.loads.append(replace(consuming.order, request=""))

    def _note_producer(self, request: Request) -> None:
        """Remember a request whose KV is to be offered. A bad ticket offers nothing; the claim is told why."""
        name = request.request_id
        parameters = _parameters(request, "produce")
        if parameters is None or name in self._producing:
            return
        try:
            ticket = tickets.verify(parameters.get("ticket"), self._secret)
        except TicketRefused:
            return
        if self._withdrawn is not None:
            self._orders.withheld.append(Withhold(ticket.handoff, self._withdrawn.reason()))
            return
        try:
            prompt = identity(request)
        except Refused as exc:
            self._orders.withheld.append(Withhold(ticket.handoff, exc.reason()))
            return
        self._producing[name] = _Producing(ticket, prompt, request.num_prompt_tokens)

    def _consuming_of(self, request: Request) -> _Consuming | None:
        name = request.request_id
        if name in self._consuming:
            return self._consuming[name]
        parameters = _parameters(request, "consume")
        if parameters is None:
            return None
        try:
            text = parameters.get("ticket")
            ticket = tickets.verify(text, self._secret)
        except TicketRefused as exc:
            consuming = _Consuming(None, exc, None)
        else:
            denial = self._withdrawn
            if ticket.consumer != self._epoch:
                denial = tickets.other_epoch(self._epoch, ticket.consumer)
            prompt = b""
            try:
                prompt = identity(request)
            except Refused as exc:
                denial = denial or exc
            order = Order(name, ticket, str(text), prompt, 0, 0, ())
            until = time.monotonic() + ticket.milliseconds / 1000
            consuming = _Consuming(order, denial, ticket.handoff, until, parameters.get("early") is True)
        self._consuming[name] = consuming
        return consuming


def _parameters(request: Request, side: str) -> dict[str, Any] | None:
    given = (request.kv_transfer_params or {}).get(PARAMETER)
    return given if isinstance(given, dict) and given.get("side") == side else None

"""Whole handoffs, from the blocks of one process to those of another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from deeplink.bench.child import Child, child, cpu_seconds
from deeplink.bench.engine import LOOK, SECRET, Engine, Shape, encode
from deeplink.bench.stages import Stages
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.ticket import Ticket

SECONDS = 120.0


class Failed(RuntimeError):
    """A handoff that did not end well, or not exactly: a figure of it would mean nothing."""


@dataclass
class Pair:
    """A prefill engine here and a decode engine in the process `there`, with an agreement."""

    ours: Engine
    there: Child
    theirs: Contract
    agreement: Agreement
    tables: tuple[list[int], list[int]]
    _stages: Stages = field(default_factory=Stages)

    @property
    def bytes(self) -> int:
        return self.ours.shape.bytes

    def hand_over(self) -> float:
        """Seconds from when prefill has computed the last token, with its first `fill`, until the decode engine's loop
        sees that everything is verified and in its blocks.

        The claim is there already, as it comes with the request. Inside: gather, digest, push, verify (if the shape
        says so), scatter, and all messages. Outside: minting the ticket and opening the handoff.
        """
        ours, theirs = self.tables
        ticket = tickets.issue(
            tickets.new_handoff(), self.ours.contract, self.theirs, self.agreement, int(SECONDS * 1000)
        )
        self.ours.open(ticket)
        self.there.ask(do="load", ticket=tickets.mint(ticket, SECRET), table=theirs)
        self.there.tell(do="loaded", deadline=time.monotonic() + SECONDS)
        self._await_claims(ticket)
        began = time.monotonic()
        self.ours.hand_over(ticket, ours, began + SECONDS)
        answer = self.there.hear(SECONDS)
        if answer["reason"]:
            raise Failed(answer["reason"])
        # Both clocks are the machine's since its start.
        return float(answer["at"]) - began

    def _await_claims(self, ticket: Ticket) -> None:
        deadline = time.monotonic() + SECONDS
        for rank, endpoint in enumerate(self.ours.endpoints):
            while endpoint.producer.claims < ticket.expected(rank):
                if time.monotonic() > deadline:
                    raise Failed("the decode engine does not claim the handoff")
                time.sleep(LOOK)

    def check(self) -> None:
        """Raises Failed unless the decode engine's blocks hold what the prefill engine's do."""
        ours, theirs = self.tables
        if self.ours.checksum(ours) != self.there.ask(do="checksum", table=theirs)["checksum"]:
            raise Failed("the blocks that arrived are not those that were handed over")

    def breakdown(self) -> dict[str, float]:
        """Of one more handoff, the seconds that each step took and that its threads ran, and the same of the whole."""
        self.there.ask(do="stages", on=True)
        self._stages.begin()
        before = cpu_seconds([self.there.pid])
        try:
            whole = self.hand_over()
            cpu = cpu_seconds([self.there.pid]) - before
        finally:
            spent = self._stages.end()
        return {"whole": whole, "whole cpu": cpu, **spent, **self.there.ask(do="stages", on=False)["stages"]}


@contextmanager
def pair(
    ours: Shape,
    theirs: Shape,
    here: AbstractContextManager[None] | None = None,
    there: AbstractContextManager[None] | None = None,
) -> Iterator[Pair]:
    """`here` and `there` are entered while a side is made: the network namespaces of the two. One handoff has been made
    and checked, so that connections, memory and compiled code are warm."""
    with ExitStack() as stack:
        with there or nullcontext():
            other = stack.enter_context(child("deeplink.bench.engine:decode", encode(theirs)))
            contract = contracts.from_json(other.ask(do="contract")["contract"].encode())
        with here or nullcontext():
            engine = Engine.start(ours, "prefill", seed=1)
            stack.callback(engine.close)
        agreement = negotiate(engine.contract, contract)
        if not isinstance(agreement, Agreement):
            raise Failed(str(agreement))
        if agreement.transport != ours.transport:
            raise Failed(f"the two engines agree on {agreement.transport}, not on {ours.transport}")
        made = Pair(engine, other, contract, agreement, (ours.table(1), theirs.table(2)))
        made.hand_over()
        made.check()
        yield made

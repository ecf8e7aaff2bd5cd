"""A watcher of prefills that says what it is told to."""

from __future__ import annotations

from dataclasses import dataclass, field

from deeplink.kvconnector.handoffs.handoff import NOT_BEGUN
from deeplink.kvconnector.handoffs.ticket import Ticket


@dataclass
class Stages:
    """By handoff; and who was forgotten."""

    stages: dict[str, int] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)

    def stage(self, ticket: Ticket, until: float) -> int:
        return self.stages.get(ticket.handoff, NOT_BEGUN)

    def forget(self, ticket: Ticket) -> None:
        self.forgotten.append(ticket.handoff)

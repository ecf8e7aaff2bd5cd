"""Handoffs that LMDeploy's own router has paired, without tickets of deeplink's router.

It carries, unseen, how two engines describe themselves, and a list of numbers that a prefill engine answers with and a
decode engine gets. LMDeploy takes these for block numbers; here it is one number that names a handoff. The two engines
make its ticket themselves, from the secret they share, and `kv.foreign_seconds` is the time it has, from the prompt's
last token on. Where that is 0, nothing of this is done.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Sequence

from deeplink.errors import ConfigError, HandoffError, ProtocolError, Refused
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.kvconnector.handoffs.ticket import Ticket

NUMBERS = 1 << 47
"""The numbers that name handoffs begin here, so that none is a block's or a session's; there are as many of them, and
all come back from JSON as they were sent."""


class Foreign:
    """What one engine knows of those that LMDeploy's router has connected it with."""

    def __init__(self, contract: Contract, seconds: float) -> None:
        self._contract = contract
        self._milliseconds = int(seconds * 1000)
        self._peers: dict[str, Contract] = {}

    def describe(self) -> str:
        """This engine's contract, as LMDeploy's router carries it to the other engine."""
        self._check()
        return base64.b64encode(co.encode(self._contract)).decode()

    def connect(self, peer: str, text: str) -> None:
        """Remember what `peer` states. Raises Refused, naming the field, when the two cannot hand over."""
        self._check()
        try:
            contract = co.decode(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as exc:
            raise ProtocolError(f"{peer} describes itself in no contract: {exc}") from exc
        _check_one(contract)
        ours = self._contract
        producer, consumer = (ours, contract) if ours.produces else (contract, ours)
        _agree(producer, consumer)
        self._peers[peer] = contract

    def forget(self, peer: str) -> None:
        """What it had described is not believed any more; loads that have begun go on."""
        self._peers.pop(peer, None)

    def to_offer(self) -> tuple[int, Ticket]:
        """A number, and the ticket of the handoff that it names, for whoever finds it by that."""
        self._check()
        number = NUMBERS + secrets.randbelow(NUMBERS)
        channels = (self._contract.ranks[0].channel,)
        return number, Ticket(self.name(number), self._contract.epoch, "", channels, self._milliseconds)

    def to_load(self, peer: str, numbers: Sequence[int]) -> Ticket:
        """The ticket of the handoff that `peer` has answered with these numbers for."""
        self._check()
        contract = self._peers.get(peer)
        if contract is None:
            raise HandoffError(f"{peer} has not been connected to this engine", remedy="ask LMDeploy's router to do so")
        if len(numbers) != 1:
            raise Refused(
                f"{peer} answered with {len(numbers)} numbers, where deeplink's engines answer with one",
                field="cache_block_ids",
                ours="1",
                theirs=str(len(numbers)),
                remedy="start both engines with --migration-backend deeplink",
            )
        name = _name(contract.epoch, numbers[0])
        return tickets.issue(name, contract, self._contract, _agree(contract, self._contract), self._milliseconds)

    def name(self, number: int) -> str:
        """Of the handoff that this engine has offered by a number."""
        return _name(self._contract.epoch, number)

    def _check(self) -> None:
        if not self._milliseconds:
            raise ConfigError(
                "LMDeploy's router pairs engines without deeplink's tickets, which is refused unless it is asked for",
                field="kv.foreign_seconds",
                ours="0",
                theirs="more than 0",
                remedy="use deeplink's router, or set kv.foreign_seconds in deeplink.toml to the time of a handoff",
            )
        _check_one(self._contract)


def _check_one(contract: Contract) -> None:
    """A prefill engine that makes a ticket itself does not know how many processes will come with it."""
    if len(contract.ranks) != 1:
        raise Refused(
            f"the {contract.role} engine is spread over processes; LMDeploy's router pairs only engines of one here",
            field="tp",
            ours="1",
            theirs=str(len(contract.ranks)),
            remedy="use deeplink's router",
        )


def _agree(producer: Contract, consumer: Contract) -> Agreement:
    result = negotiate(producer, consumer)
    if isinstance(result, Refusal):
        raise result.error("the prefill engine", "the decode engine")
    return result


def _name(epoch: str, number: int) -> str:
    return f"lmdeploy-{epoch}-{number:x}"

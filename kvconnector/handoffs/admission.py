"""What a claim may ask for. Pure, apart from looking at the channel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from deeplink.errors import DeeplinkError, ProtocolError, Refused
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.negotiate import STATE
from deeplink.kvconnector.contracts.prompt import check_same
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.offer import Offer


def check_claim(offer: Offer, claim: ch.Claim, channel: ch.Channel, groups: Sequence[Group]) -> None:
    """Raises what keeps this claim from being served: another transport, another prompt, what is not there."""
    agreed = channel.agreement
    if claim.transport != agreed.transport:
        raise Refused(
            "the claim is for another transport than agreed",
            field="transport",
            ours=agreed.transport,
            theirs=claim.transport,
        )
    if offer.wire != agreed.wire:
        raise Refused(
            "the ticket asks for other element types than the two engines agree on",
            field="wire",
            ours=", ".join(agreed.wire),
            theirs=", ".join(offer.wire),
            remedy="the router has an old contract of one of them; ask again",
        )
    check_same(offer.prompt, claim.prompt)
    for part in claim.parts:
        if part.group >= len(groups):
            raise ProtocolError(f"a claim on cache group {part.group} of {len(groups)}")
        group = groups[part.group]
        if not set(part.layers) <= set(group.layers) or len(set(part.layers)) < len(part.layers):
            raise ProtocolError(f"a claim on layers {part.layers} of a rank that has {group.layers}")
        if not group.heads[0] <= part.heads[0] < part.heads[1] <= group.heads[1]:
            raise ProtocolError(f"a claim on heads {part.heads} of a rank that has {group.heads}")
        if part.start < part.stop:
            _check_tokens(offer, claim, part, group)
        elif part.start > part.stop:
            raise ProtocolError(f"a claim on tokens [{part.start}, {part.stop})")
    _check_overlaps(claim.parts)


def _check_tokens(offer: Offer, claim: ch.Claim, part: ch.Part, group: Group) -> None:
    first, last = offer.ranges[part.group]
    if part.stop > last:
        raise ProtocolError(f"tokens [{part.start}, {part.stop}) of a prompt of {last}")
    if part.start < first:
        raise Refused(
            f"of a sliding window only the tokens from {first} on are kept, not those from {part.start}",
            field="tokens",
            ours=f"[{first}, {last})",
            theirs=f"[{part.start}, {part.stop})",
            remedy="load the prompt up to its last token but one",
        )
    if group.spec.kind == STATE and claim.stop != offer.tokens:
        raise Refused(
            f"the state after {offer.tokens} tokens is not the one after {claim.stop}, and cannot be made into it",
            field="tokens",
            ours=str(offer.tokens),
            theirs=str(claim.stop),
            remedy=f"let the prefill engine hand over {claim.stop} tokens of this prompt, or the decode engine go on "
            f"from {offer.tokens}; one that computes the last token itself needs the state before it",
        )


def _check_overlaps(parts: Sequence[ch.Part]) -> None:
    """What is asked for twice is sent twice: a claim of the same part many times over would cost us so many pushes."""
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts:
        for layer in part.layers:
            taken.setdefault((part.group, layer), []).append(part.heads)
    for (group, layer), ranges in taken.items():
        ranges.sort()
        for (_, stop), (start, _) in pairwise(ranges):
            if start < stop:
                raise ProtocolError(f"a claim on head {start} of layer {layer} of cache group {group} twice")


def check_resumed(before: Sequence[ch.Part], parts: Sequence[ch.Part]) -> None:
    """A claim that comes back wants what it wanted, but for tokens that have landed; others may be gone by now.

    One that wants more than it did when it came back last is an old one that was under way for long.
    """
    if len(before) != len(parts) or any(
        part.start < old.start or part != msgspec.structs.replace(old, start=part.start)
        for old, part in zip(before, parts, strict=True)
    ):
        raise ProtocolError("a claim that comes back for something else than it was made for")


def check_quit(channel: ch.Channel, deadline: float) -> None:
    """While nothing is expected from the consumer, anything that comes is its farewell."""
    if channel.readable(0):
        message = channel.receive(deadline)
        if isinstance(message, ch.Quit):
            raise DeeplinkError.from_reason(message.reason)
        raise ProtocolError(f"{type(message).__name__} out of turn")

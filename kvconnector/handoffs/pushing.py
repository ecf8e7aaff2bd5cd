"""The pushes of one claim: over one link, several under way at once where the link can do that.

A link that waits for each push to be acknowledged stands idle for a round trip per chunk. One that can `post` is kept a
few chunks ahead. Should it break, everything that is under way is pushed again over a fresh one, once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deeplink.errors import DeeplinkError, PeerGone
from deeplink.kvconnector.handoffs.offer import Announced, Offer, Taking, settle
from deeplink.kvconnector.transport.base import Link, PostingLink, Push
from deeplink.kvconnector.transport.staging import Staging
from deeplink.kvconnector.wires.pool import Pool

POSTS = 3
"""Pushes under way behind the one that is waited for."""


@dataclass(slots=True)
class _Posted:
    one: Announced
    pushes: Sequence[Push]
    wait: Callable[[float], None]


@dataclass(slots=True)
class Pushing:
    """Guarded by the producer's lock (`changed`) is `taking.link`, which whoever ends the handoff closes."""

    offer: Offer
    taking: Taking
    peer: tuple[str, str]
    connect: Callable[[], Link]
    current: Callable[[], bool]
    """Whether the claim is still served here, and its channel is not at its end."""
    staging: Staging
    links: Pool[Link]
    changed: threading.Condition
    _posted: deque[_Posted] = field(default_factory=deque)
    _posting: PostingLink | None = None
    """The link, where it is one that can have several pushes under way."""

    def open(self) -> None:
        """A kept link, or a new one."""
        self._attach(self.links.take(self.peer) or self.connect())

    def close(self, healthy: bool) -> None:
        """Keep the link for others if all went well. One that still owes answers is not kept."""
        healthy = healthy and not self._posted
        self._posted.clear()
        with self.changed:
            link, self.taking.link = self.taking.link, None
            # `Offers.end` closes the links it has found here, so one it may have seen is not kept for others.
            healthy = healthy and self.offer.ended is None
        if link is None:
            return
        if healthy:
            self.links.give(self.peer, link)
        else:
            link.close()
            self.links.drop(self.peer)

    def post(self, one: Announced, pushes: Sequence[Push]) -> None:
        """Send a part of a chunk on its way. Its source is not read any more when this returns."""
        with self._reading(one):
            try:
                wait = self._send(pushes)
            except PeerGone as exc:
                self._again(exc)
                self._link.push(pushes, self.offer.deadline)
                wait = _there
        self._posted.append(_Posted(one, pushes, wait))

    @property
    def under_way(self) -> bool:
        return bool(self._posted)

    @property
    def full(self) -> bool:
        """Whether the first should be waited for before anything else, because enough is under way or it is there."""
        return len(self._posted) > POSTS or (self.under_way and self._posted[0].wait is _there)

    def arrived(self) -> Announced:
        """Wait until what was posted first is in the peer's memory."""
        first = self._posted[0]
        try:
            first.wait(self.offer.deadline)
        except PeerGone as exc:
            self._again(exc)
        return self._posted.popleft().one

    def _send(self, pushes: Sequence[Push]) -> Callable[[float], None]:
        link = self._link
        if link is self._posting:
            return self._posting.post(pushes, self.offer.deadline)
        link.push(pushes, self.offer.deadline)
        return _there

    def _again(self, cause: PeerGone) -> None:
        """Over a fresh link, push all that was posted. Raises the cause when there is no reason to try."""
        if self.offer.ended is not None or not self.current():
            raise cause
        posted = list(self._posted)
        self.close(healthy=False)
        self._attach(self.connect())
        for each in posted:
            with self._reading(each.one):
                self._link.push(each.pushes, self.offer.deadline)
            each.wait = _there
        self._posted.extend(posted)

    def _attach(self, link: Link) -> None:
        """From here on the end of the handoff closes it."""
        with self.changed:
            ended = self.offer.ended
            if ended is None:
                self.taking.link = link
        # Asking a protocol takes as long as a message.
        self._posting = link if isinstance(link, PostingLink) else None
        if ended is not None:
            link.close()
            raise DeeplinkError.from_reason(ended)

    @property
    def _link(self) -> Link:
        link = self.taking.link
        if link is None:
            raise PeerGone("the claim has been taken over by a newer connection")
        return link

    @contextlib.contextmanager
    def _reading(self, one: Announced) -> Iterator[None]:
        """While the piece's bytes are read it is nobody else's, whatever becomes of the handoff."""
        with self.changed:
            if self.offer.ended is not None:
                raise DeeplinkError.from_reason(self.offer.ended)
            one.staged.readers += 1
        try:
            yield
        finally:
            with self.changed:
                one.staged.readers -= 1
                settle(one.staged, self.staging)


def _there(deadline: float) -> None:
    """What was pushed rather than posted is in the peer's memory already."""

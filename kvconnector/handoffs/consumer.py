"""The consumer's side: claim a handoff, receive its chunks, verify them, and scatter them into the engine's blocks.

`load` starts a thread per handoff and returns; `collect` gives what has ended since the last call. Between the two
the blocks in the order belong to the consumer: the engine must neither free nor read them. `cancel` ends a load now.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from deeplink.errors import DeeplinkError, HandoffError, LayoutError, Reason, Refused
from deeplink.kvconnector.caches.group import Group
from deeplink.kvconnector.contracts.shares import Needs, Share, held
from deeplink.kvconnector.handoffs import channel as ch
from deeplink.kvconnector.handoffs.handoff import FINAL, Ledger
from deeplink.kvconnector.handoffs.landing import Load, Taken, given_up
from deeplink.kvconnector.handoffs.order import Order, Outcome
from deeplink.kvconnector.handoffs.receive import DIAL_SECONDS, FAREWELL_SECONDS, Dial, Receiving, farewell
from deeplink.kvconnector.relayout.digest import Sample
from deeplink.kvconnector.transport.base import Transport
from deeplink.kvconnector.transport.quarantine import Quarantine
from deeplink.kvconnector.transport.staging import Staging
from deeplink.kvconnector.wires.pool import Pool


class Consumer:
    """All handoffs this process consumes. `rank` is its place among the ranks of its engine."""

    def __init__(
        self,
        groups: Sequence[Group],
        staging: Staging,
        ledger: Ledger,
        transports: Mapping[str, Transport],
        dial: Dial,
        *,
        verify: bool,
        every: int = 1,
        rank: int = 0,
    ) -> None:
        """With `verify`, what arrives is digested, one tile of `every` so many, and compared with what was staged."""
        self._groups = groups
        self._staging = staging
        self._quarantine = Quarantine(staging)
        self._ledger = ledger
        self._transports = transports
        self._dial = dial
        self._verify = verify
        self._every = every
        self._rank = rank
        self._channels: Pool[ch.Channel] = Pool()
        self._loads: dict[str, Load] = {}
        self._concluding: set[Load] = set()
        """Those that have ended well, and whose producers have yet to say that they know."""
        self._ended: deque[Outcome] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def claims(self) -> int:
        with self._lock:
            return len(self._loads)

    def load(self, order: Order) -> None:
        """Start loading. Never raises: what cannot start ends at once as failed.

        So does an id that was loaded before: one incarnation claims an id once. Where the cache is on a device, nothing
        is written to the blocks before what the calling thread has put on its current stream there is done.
        """
        name = order.ticket.handoff
        if not self._ledger.begin(name, "consumer", "receiving"):
            reason = Reason("ticket_refused", "this handoff was claimed before", field="handoff", theirs=name)
            self._ended.append(Outcome(order, reason))
            return
        deadline = time.monotonic() + order.ticket.milliseconds / 1000
        # Another offset each time, so that a tile that is always wrong is not always missed.
        sample = Sample(self._every, secrets.randbelow(self._every))
        load = Load(order, [group.as_of_now() for group in self._groups], deadline, sample)
        with self._lock:
            self._loads[name] = load
            closed = self._closed
        if closed:
            self._end(load, given_up().reason())
            return
        try:
            threading.Thread(target=self._run, args=(load,), name=f"deeplink-load-{name}", daemon=True).start()
        except RuntimeError as exc:  # the process may have no more threads
            self._end(load, _no_thread(exc).reason())

    def cancel(self, name: str, request: str | None = None) -> None:
        """End the load now: when this returns nothing is written to its blocks any more, whatever the producer does.

        The producer is told, without waiting for it. With `request`, only if it is that one's load.
        """
        with self._lock:
            load = self._loads.get(name)
        if load is None:
            record = self._ledger.get(name)
            if record is not None and record.side == "consumer" and record.state in FINAL:
                self._ledger.too_late()
        elif request in (None, load.order.request):
            self._give_up(load, given_up())

    def close(self) -> None:
        """Give up what is loading, let the producers know (within a second), and close what is kept open."""
        with self._lock:
            self._closed = True
            loads, concluding = list(self._loads.values()), list(self._concluding)
        until = time.monotonic() + FAREWELL_SECONDS
        for load in concluding:
            self._hang_up(load)
        for thread in [thread for load in loads for thread in self._give_up(load, given_up())]:
            thread.join(max(0.0, until - time.monotonic()))
        self._channels.close()

    def collect(self) -> list[Outcome]:
        """The loads that ended since the last call, each exactly once."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def _give_up(self, load: Load, why: DeeplinkError) -> list[threading.Thread]:
        with load.lock:
            if load.loaded:  # it ends well in this moment, and nothing is written any more
                return []
            load.cancelled = True
            channels = list(load.channels)
        self._end(load, why.reason())
        threads = []
        for channel in channels:
            # In a thread: a producer that does not read must not hold up the engine.
            thread = threading.Thread(target=_part, args=(channel, why), name="deeplink-part", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: the end of the connection has to tell it
                channel.close()
            else:
                threads.append(thread)
        return threads

    def _hang_up(self, load: Load) -> None:
        """Close the channels of a load that has ended."""
        with load.lock:
            load.cancelled = True
            channels = list(load.channels)
        for channel in channels:
            channel.close()

    def _run(self, load: Load) -> None:
        # Whatever happens in this thread, the engine hears of the end: a request must not wait for a dead thread.
        reason: Reason | None = _unexpected().reason()
        try:
            self._quarantine.retry()
            self._receive(load)
            reason = None
        except DeeplinkError as exc:
            reason = exc.reason()
        finally:
            if load.loaded:
                with self._lock:
                    self._concluding.discard(load)
            else:
                self._end(load, reason)

    def _end(self, load: Load, reason: Reason | None) -> None:
        """Close the load, once; who comes second changes nothing."""
        with load.writing:
            over, load.over = load.over, True
        if over:
            self._ledger.too_late()
            return
        name = load.order.ticket.handoff
        with self._lock:
            del self._loads[name]
        self._ledger.end(
            name,
            "loaded" if reason is None else "failed",
            reason,
            tokens=max(load.tokens.values(), default=0),
            kv_bytes=load.moved,
            digest=load.total if self._verify else None,
            resumed=load.resumed,
            converting=load.converting,
        )
        self._ended.append(Outcome(load.order, reason, load.first))

    def _receive(self, load: Load) -> None:
        """From all sources at once; the first that fails ends the load."""
        missing: set[Receiving] = set()

        def landed(receiving: Receiving) -> None:
            """The engine goes on with the last of them, and does not wait for what the producers are still told."""
            with load.lock:
                last = missing == {receiving}
                missing.discard(receiving)
                load.loaded = load.loaded or (last and not load.cancelled)
            if last and load.loaded:
                with self._lock:
                    self._concluding.add(load)
                self._end(load, None)

        sources = self._sources(load, landed)
        missing.update(receiving for receiving, _ in sources)
        failed: list[DeeplinkError] = []
        done: list[Receiving] = []

        def run(receiving: Receiving, kept: bool) -> None:
            # A thread that dies of a bug has not received its share, so it must not look like one that has.
            why: DeeplinkError | None = _unexpected()
            try:
                receiving.run(kept=kept)
                done.append(receiving)
                why = None
            except DeeplinkError as exc:
                why = exc
            finally:
                if why is not None:
                    failed.append(why)
                    if len(failed) == 1 and len(sources) > 1 and not load.loaded:
                        self._give_up(load, why)

        threads: list[threading.Thread] = []
        for source in sources[1:]:
            thread = threading.Thread(target=run, args=source, name="deeplink-load-part", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # the process may have no more threads
                failed.append(_no_thread(exc))
                self._give_up(load, failed[0])
                break
            threads.append(thread)
        try:
            for source in sources[:1]:
                run(*source)
        finally:
            for thread in threads:
                thread.join()
        if failed:
            raise failed[0]
        if len(done) < len(sources):
            raise _unexpected()

    def _sources(self, load: Load, landed: Callable[[Receiving], None]) -> list[tuple[Receiving, bool]]:
        """What is taken from each source, once a channel to it is open; and whether that was open already.

        An order for nothing goes to all of them too: each is told that it may let go.
        """
        order = load.order
        if order.start < order.stop and len(order.tables) != len(self._groups):
            raise LayoutError(f"{len(order.tables)} block tables for {len(self._groups)} cache groups")
        needs = Needs([(group.layers, group.heads) for group in self._groups])
        found: list[tuple[Receiving, bool]] = []
        opened: list[ch.Channel] = []
        failure: DeeplinkError | None = _unexpected()
        numbers = itertools.count()
        try:
            for address in order.ticket.sources(self._rank):
                channel, kept = self._connect(load, address)
                with load.lock:
                    load.channels.add(channel)
                    cancelled = load.cancelled
                opened.append(channel)
                if cancelled:
                    raise given_up()
                shares = needs.take(held(channel.peer.groups, channel.peer.ranks[0]))
                taken = tuple(filter(None, (self._take(load, channel, share, next(numbers)) for share in shares)))
                receiving = Receiving(
                    load,
                    address,
                    channel,
                    taken,
                    self._dial,
                    self._channels,
                    self._staging,
                    self._quarantine,
                    self._transports,
                    self._verify,
                    landed,
                )
                found.append((receiving, kept))
            if needs.missing:
                raise Refused(
                    f"no rank of the prefill engine that the ticket names has {needs.missing}",
                    field="ranks",
                    remedy="the router has an old contract of one of the engines; ask again",
                )
            failure = None
        except DeeplinkError as exc:
            failure = exc
            raise
        finally:
            if failure is not None:
                for channel in opened:
                    _part(channel, failure)
        return found

    def _connect(self, load: Load, address: str) -> tuple[ch.Channel, bool]:
        kept = self._channels.take(address)
        return kept or self._dial(address, min(load.deadline, time.monotonic() + DIAL_SECONDS)), kept is not None

    def _take(self, load: Load, channel: ch.Channel, share: Share, number: int) -> Taken | None:
        """None when none of the order's tokens is needed of it."""
        order, group = load.order, load.groups[share.theirs]
        start, stop = group.wanted(order.start, order.stop)
        if start >= stop:
            return None
        wire = group.wire(channel.agreement.wire[share.ours]).part(share.layers, share.heads)
        return Taken(number, share, group, order.tables[share.theirs], wire, start, stop)


def _unexpected() -> HandoffError:
    return HandoffError("the load ended unexpectedly; see the engine's log")


def _no_thread(exc: RuntimeError) -> HandoffError:
    return HandoffError(f"the load could not start: {exc}", remedy="raise the engine's limit of threads")


def _part(channel: ch.Channel, why: DeeplinkError) -> None:
    farewell(channel, why.reason())
    channel.close()

"""Which engines a request gets, now or after a wait: what the policies say, among those that take requests.

Between a choice and its `take` nothing else may run, or two requests choose by the same load: `choose` does not suspend
after it has chosen, and its caller takes the engines at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from deeplink.config import RouteEntry, RouterSection
from deeplink.errors import DeeplinkError, Overloaded
from deeplink.registry import Registry
from deeplink.router import prefix
from deeplink.router.breaker import Breaker
from deeplink.router.choice import Pair, Plain, Shut, Table, choose, readers
from deeplink.router.engine import Engine
from deeplink.router.fleet import Fleet
from deeplink.router.kv_index import Index
from deeplink.router.load import Hold, Load
from deeplink.router.policy import Policy, Snapshot, View, Work
from deeplink.router.prompts import Chains
from deeplink.router.queue import Queue
from deeplink.router.routes import Routes


@dataclass(slots=True)
class Need:
    """What of a request matters to the choice. `tokens`, of the prompt, and `output` are estimates; `chain` are the
    hashes of the prompt (`prefix.hashes`), empty where no policy reads prompts, and `chains` those of
    its tokens (`kv_index.chain`), None if they are not known. `barred` are the kinds of engines that
    could not hand it over, each with the field that says why. `grant` is for whoever chooses."""

    handoff: bool
    tokens: int = 0
    output: int = 0
    session: str = ""
    chain: tuple[int, ...] = ()
    chains: Chains | None = None
    barred: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    generates: bool = False
    grant: int = 0


class Admission:
    """Raises PluginError on making if the configuration names a policy that no plugin has. `guessed` counts requests
    whose tokens were not known although a policy looks them up."""

    def __init__(
        self,
        fleet: Fleet,
        section: RouterSection,
        policies: Registry[Policy],
        routes: Sequence[RouteEntry] = (),
    ) -> None:
        self._fleet = fleet
        self._section = section
        self._policies = {
            "prefill": policies.get(section.prefill_policy),
            "decode": policies.get(section.decode_policy),
        }
        self.reads_prompts = any(policy.reads_prompts for policy in self._policies.values())
        self.reads_caches = any(policy.reads_caches for policy in self._policies.values())
        self.index = Index()
        self.guessed = 0
        self.load = Load()
        self.queue = Queue(section.queue, section.queue_seconds)
        self.draining: set[str] = set()
        self._prefixes = prefix.Prefixes()
        self._routes = Routes(routes)
        self._breakers: dict[str, Breaker] = {}
        self._failing: set[str] = set()
        self._epochs: dict[str, str] = {}
        self._turn = 0
        self._stride = 1
        self._views: tuple[Sequence[Engine], tuple[View, ...]] = ((), ())
        fleet.on_change = self.changed
        self.changed()

    def route(self, entries: Sequence[RouteEntry]) -> None:
        """From now on by these routes. Requests that have been given their engines keep them."""
        self._routes = Routes(entries)
        self.queue.wake()

    async def choose(self, need: Need, avoid: frozenset[str] = frozenset()) -> Plain | Pair:
        """As `choice.choose`, waiting while all engines are full. Where nothing is found, all engines are looked at
        once more before that is raised."""
        try:
            return await self.queue.turn(lambda: self._choose(need, avoid))
        except Overloaded:
            raise
        except DeeplinkError:
            await self._fleet.look()
        return await self.queue.turn(lambda: self._choose(need, avoid))

    def at_once(self, need: Need) -> Engine | None:
        """The engine for a request that is surely not handed over, if there is nothing to wait for and nothing that
        keeps any engine back. None leaves all to `choose`; nothing has been counted then."""
        table = self._fleet.table
        engines = table.whole if need.generates else table.able
        if not engines or (need.handoff and table.split) or self.queue.waiting or self._routes:
            return None
        section = self._section
        # Whether any engine is shut is known without looking at each.
        if self.draining or self._failing or section.max_requests or self._fleet.fullest >= section.kv_limit:
            return None
        self._turn += 1
        self._stride = 1
        return self._pick(need, "decode", engines)

    async def reader(self, pair: Pair, need: Need, avoid: frozenset[str]) -> Pair | None:
        """Another pair with the same prefill engine, whose decode engine can fetch what is staged there. Does not
        suspend."""
        pairs = readers(self._fleet.table, pair, self.shut(), avoid)
        if not pairs:
            return None
        chosen = self._pick(need, "decode", [other.decode for other in pairs])
        return next(other for other in pairs if other.decode is chosen)

    def take(self, engine: Engine, need: Need, *, prefill: bool, decode: bool) -> Hold:
        """Counts the request at this engine, which was just chosen for it, until the hold ends."""
        name = engine.name
        breaker = self._breakers.get(name)
        trying = breaker is not None and breaker.begin()
        if prefill and need.chain:
            self._prefixes.add(name, need.chain)
        return self.load.take(
            name,
            prefill=need.tokens if prefill else 0,
            decode=need.tokens + need.output if decode else 0,
            ended=partial(self._ended, name) if trying else self.queue.wake,
        )

    def handing(self, need: Need, handoff: str) -> None:
        """Who serves the request counts for it here: there is nobody else to be told."""

    def settle(self, need: Need) -> None:
        """As above: what was taken for it ends with its holds."""

    @property
    def sizes(self) -> set[int]:
        return self.index.sizes

    def guess(self) -> None:
        self.guessed += 1

    def succeeded(self, engine: Engine) -> None:
        breaker = self._breakers.get(engine.name)
        if breaker is not None and breaker.failures:
            breaker.succeeded()
            self._failing.discard(engine.name)

    def failed(self, engine: Engine) -> None:
        """A request failed, and it was this engine's doing."""
        name, section = engine.name, self._section
        breaker = self._breakers.get(name)
        if breaker is None:
            breaker = self._breakers[name] = Breaker(section.breaker_failures, section.breaker_seconds)
        breaker.failed(time.monotonic())
        if breaker.until:
            self._failing.add(name)

    def shut(self) -> dict[str, Shut]:
        """The engines that get no new requests, and why."""
        found: dict[str, Shut] = {}
        now, limit = time.monotonic(), self._section.max_requests
        for engine in self._fleet.table.engines:
            name = engine.name
            breaker = self._breakers.get(name)
            if name in self.draining:
                found[name] = Shut("draining")
            elif breaker is not None and (why := breaker.shut(now)):
                found[name] = Shut(why, doubted=True)
            elif limit and self.load.all(name)[2] >= limit:
                found[name] = Shut(f"{limit} requests run there, the limit", full=True)
            elif (use := self._fleet.use(name)) >= self._section.kv_limit:
                found[name] = Shut(f"{use:.0%} of its KV memory is in use", full=True)
        return found

    def changed(self) -> None:
        """Something about the engines changed: forget what was known of those that were restarted or are gone."""
        engines = self._fleet.table.engines
        for engine in engines:
            self.load.of(engine.name).weight = engine.weight
            epoch = engine.contract.epoch if engine.contract else ""
            if epoch and self._epochs.get(engine.name) != epoch:
                self._epochs[engine.name] = epoch
                self._forget(engine.name)
            if tokens := self._fleet.cache_tokens(engine.name):
                self._prefixes.resize(engine.name, tokens)
        names = {engine.name for engine in engines}
        self.load.keep(names)
        for gone in self._epochs.keys() - names:
            del self._epochs[gone]
            self._forget(gone)
            self.draining.discard(gone)
        self.queue.wake()

    def _forget(self, name: str) -> None:
        self._prefixes.forget(name)
        self.load.forget(name)
        self._breakers.pop(name, None)
        self._failing.discard(name)

    def _ended(self, name: str) -> None:
        """The request that tried whether the engine is well again has ended."""
        if (breaker := self._breakers.get(name)) is not None:
            breaker.ended()
        self.queue.wake()

    def _choose(self, need: Need, avoid: frozenset[str]) -> Plain | Pair:
        self._turn += 1
        self._stride = 1
        shut = self.shut()
        sound = {name: replace(why, doubted=False) for name, why in shut.items()}
        sound |= {name: Shut("it has just failed") for name in avoid}

        def among(table: Table, only_sound: bool) -> Plain | Pair:
            return choose(
                table,
                handoff=need.handoff,
                generates=need.generates,
                pick=lambda work, engines: self._pick(need, work, engines),
                shut=sound if only_sound else shut,
                avoid=avoid,
                barred=need.barred,
            )

        return self._routes.choose(self._fleet.table, need.tokens, among)

    def _pick(self, need: Need, work: Work, engines: Sequence[Engine]) -> Engine:
        policy = self._policies[work]
        chain = need.chain if policy.reads_prompts else ()
        said = self.index.held(need.chains) if policy.reads_caches and need.chains is not None else None
        if chain or said is not None or self.load.others:
            views = tuple([self._view(engine, chain, said) for engine in engines])
        else:
            views = self._known(engines)
        snapshot = Snapshot(
            work,
            views,
            need.tokens,
            # In pairs the two would go round in step otherwise, and some pairs never be chosen.
            self._turn if work == "prefill" else self._turn // self._stride,
            (random.random(), random.random()),
            need.session,
            prefix.start(chain) if chain else 0,
        )
        if work == "prefill":
            self._stride = len(engines)
        return engines[policy.pick(snapshot)]

    def _known(self, engines: Sequence[Engine]) -> tuple[View, ...]:
        """What all policies see of these engines. Mostly the same are asked for again."""
        known, views = self._views
        if known is not engines:
            views = tuple([self.load.of(engine.name) for engine in engines])
            if isinstance(engines, tuple):
                self._views = engines, views
        return views

    def _view(self, engine: Engine, chain: tuple[int, ...], said: dict[str, int] | None) -> View:
        name, load = engine.name, self.load
        exact = said is not None and not self.index.why(name)
        return View(
            name,
            *load.all(name),
            engine.weight,
            load.of(name).seconds,
            said.get(name, 0) if said is not None and exact else self._prefixes.held(name, chain) if chain else 0,
            exact,
        )

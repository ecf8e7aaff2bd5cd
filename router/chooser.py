"""What serving a request needs of whoever knows the engines and counts what they have been given.

In a router of one process these are `Fleet` and `Admission` themselves; a worker asks the process that owns them
(`borrowed`).
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from deeplink.registry import Registry
    from deeplink.router.admission import Need
    from deeplink.router.choice import Pair, Plain, Table
    from deeplink.router.control import HandoffState
    from deeplink.router.engine import Engine
    from deeplink.router.exchange import Exchange
    from deeplink.router.kinds import Kind
    from deeplink.router.load import Hold, Load


class Known(Protocol):
    """The engines, as `Fleet` has them."""

    @property
    def table(self) -> Table: ...

    @property
    def kinds(self) -> Registry[Kind]: ...

    async def look(self, names: Iterable[str] | None = None) -> None: ...

    async def state(self, engine: Engine, handoff: str) -> HandoffState | None: ...

    async def stage(self, engine: Engine, handoff: str, known: int, until: float) -> int | None: ...

    async def link(self, producer: Engine, consumer: Engine) -> None: ...

    def cancel(self, handoff: str, engines: Iterable[Engine]) -> None: ...

    def later(self, work: Coroutine[Any, Any, None]) -> None: ...

    def silent(self, engine: Engine, heard: float = 0.0) -> str: ...

    def early(self, name: str) -> bool: ...


class Chooser(Protocol):
    """Who gets what, as `Admission` says it. `load` is what this process has given.

    A request's `Need` is passed to `settle` when it has ended, however it did.
    """

    load: Load
    reads_prompts: bool
    reads_caches: bool

    @property
    def sizes(self) -> set[int]:
        """The block sizes that prompts are looked up by."""

    def guess(self) -> None:
        """The tokens of a prompt were not known in time."""

    async def choose(self, need: Need, avoid: frozenset[str] = frozenset()) -> Plain | Pair: ...

    def at_once(self, need: Need) -> Engine | None: ...

    async def reader(self, pair: Pair, need: Need, avoid: frozenset[str]) -> Pair | None: ...

    def take(self, engine: Engine, need: Need, *, prefill: bool, decode: bool) -> Hold: ...

    def handing(self, need: Need, handoff: str) -> None:
        """The engines just chosen will know the request by this id."""

    def settle(self, need: Need) -> None: ...

    def succeeded(self, engine: Engine) -> None: ...

    def failed(self, engine: Engine) -> None: ...


class Ending(Protocol):
    """What is counted of a request that has ended, as `Exchange` has it."""

    @property
    def kind(self) -> str: ...

    @property
    def tried(self) -> int: ...

    @property
    def ends(self) -> tuple[tuple[str, str, bool], ...]: ...


class Live(Protocol):
    """What is shown of a request that runs, as `Exchange` has it."""

    @property
    def handoff(self) -> str: ...

    @property
    def prefill(self) -> str: ...

    @property
    def decode(self) -> str: ...

    @property
    def phase(self) -> str: ...


class Counting(Protocol):
    """As `Metrics`."""

    def first_byte(self, exchange: Exchange, seconds: float) -> None: ...

    def ended(self, exchange: Exchange, status: str, code: str, seconds: float) -> None: ...

    def refused(self, status: str, code: str) -> None: ...


class Remembering(Protocol):
    """As `Recent`."""

    def begun(self, exchange: Exchange) -> None: ...

    def ended(self, exchange: Exchange, status: str, code: str, first: float, whole: float) -> None: ...

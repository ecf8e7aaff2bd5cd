from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from loopback import Pair, make_pair
from sockets import Ends
from world import Engine

from deeplink.kvconnector.relayout import compiled, in_blocks


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    """Makes pairs as `loopback.make_pair` does, and closes them in the end."""
    made: list[Pair] = []

    def _make(**sides: dict[str, object]) -> Pair:
        made.append(make_pair(**sides))
        return made[-1]

    yield _make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make: Callable[..., Pair]) -> Pair:
    return make()


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Compiling takes seconds, which are not those of the test that happens to come first."""
    compiled.warm()
    in_blocks.warm()


@pytest.fixture(scope="module", params=["numpy", "numba"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """What uses this runs twice: with numpy's loops, and with the compiled ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiled.VARIABLE, request.param)
        yield request.param


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Starts engines of several ranks, and closes them in the end."""
    with ExitStack() as stack:

        def _start(*arguments: object, **options: object) -> Engine:
            engine = Engine.start(*arguments, **options)  # type: ignore[arg-type]
            stack.callback(engine.close)
            return engine

        yield _start


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a connection."""
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()

"""The engines of the session. They are started once, side by side, and ended whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from fleet import Fleet, Pair, Running
from matrix import Matrix

LEFT_OUT = pytest.StashKey[set[str]]()
"""The tests of this folder that were found but are not to run, by ``-m`` or ``-k``."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = set()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "tests/engines/" in item.nodeid:
            item.config.stash[LEFT_OUT].add(item.nodeid)


OTHERS = ("test_sglang.py", "test_sglang_hicache.py", "test_lmdeploy.py", "test_emitted_kinds.py")
"""The files of this folder that are about engines of another kind."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engines/" in item.nodeid:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(600))
            if item.path.name not in OTHERS:
                item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    """Collects what works with what; written when nothing failed."""
    made = Matrix()
    yield made
    if not request.session.testsfailed:
        chosen = {item.nodeid for item in request.session.items if "tests/engines/" in item.nodeid}
        made.write(chosen | request.config.stash[LEFT_OUT])


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def unlike(fleet: Fleet) -> tuple[Running, Running]:
    """A prefill engine with other weights of the same shape, and a decode engine that verifies no digest and registers
    with a router that need not be there."""
    careless = fleet.folder / "careless.toml"
    careless.write_text('[kv]\ndigest = "off"\n')
    return (
        fleet.prepare("other-weights", "prefill", block_size=64, model=fleet.variant()),
        fleet.prepare(
            "careless",
            "decode",
            block_size=128,
            config=careless,
            flags=("--deeplink-router", f"http://127.0.0.1:{fleet.registry}"),
        ),
    )


@pytest.fixture(scope="session")
def pair(fleet: Fleet, unlike: tuple[Running, Running]) -> Pair:
    # Few blocks and short steps: a long prompt takes many steps, and two long ones do not fit.
    small = ("--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "24")
    consent = fleet.folder / "prefill.toml"
    consent.write_text('[kv]\ncasts = ["float32->float16"]\n')
    prefill = fleet.prepare("prefill", "prefill", block_size=64, flags=small, config=consent)
    decode = fleet.prepare("decode", "decode", worker=True, block_size=128)
    fleet.start(prefill, decode, *unlike)
    return Pair(fleet, prefill, decode, fleet.router(prefill, decode, dispatch="together"))

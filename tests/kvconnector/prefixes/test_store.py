"""The store of prefixes: what is read is what was written, or a miss; its bound holds, and nothing half written is
seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import Sized, layouts

from deeplink.errors import ConfigError, LayoutError, ProtocolError
from deeplink.kvconnector.caches.cache import Cache
from deeplink.kvconnector.contracts.contract import CacheGroup, Model, Scales
from deeplink.kvconnector.prefixes import room as prefix_room
from deeplink.kvconnector.prefixes import space as prefix_space
from deeplink.kvconnector.prefixes.names import PageName, pages
from deeplink.kvconnector.prefixes.pages import Pages
from deeplink.kvconnector.prefixes.room import RESERVED, Room
from deeplink.kvconnector.prefixes.space import Space
from deeplink.kvconnector.prefixes.store import Store
from deeplink.kvconnector.relayout.plan import Chunk

MODEL = Model("LlamaForCausalLM", 2, 1000, "{}", "none", "w1")
LAYERS, HEADS, DIM, UNIT = 2, 2, 4, 2
SPACE = Space(MODEL, (0, 1), 2, HEADS, DIM, "float16", UNIT)
NAMES = [page.units[-1] for page in pages(range(400), UNIT, UNIT)]
MUCH = 1 << 20
_FOLDERS = count()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "store", MUCH, SPACE)
    yield made
    made.close()


def content(seed: int, space: Space = SPACE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, space.shape, np.uint16)


def read(store: Store, name: str) -> np.ndarray | None:
    wire = np.zeros(store.space.shape, store.dtype)
    return wire if store.get(name, wire) else None


def entry(store: Store, name: str) -> Path:
    (found,) = (store._folder).glob(f"*/{name}")
    return found


def test_what_is_written_is_read(store: Store) -> None:
    assert read(store, NAMES[0]) is None
    assert store.put(NAMES[0], content(0))
    assert np.array_equal(read(store, NAMES[0]), content(0))
    assert (store.counts().written, store.counts().hits, store.counts().misses) == (1, 1, 1)


def test_what_is_there_is_kept(store: Store) -> None:
    store.put(NAMES[0], content(0))
    used = store.used()
    assert store.put(NAMES[0], content(1))
    assert np.array_equal(read(store, NAMES[0]), content(0))
    assert store.used() == used
    assert store.counts().kept == 1


def test_two_processes_worth_of_stores_share_a_folder(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "store", MUCH, SPACE)
    store.put(NAMES[0], content(0))
    assert np.array_equal(read(other, NAMES[0]), content(0))
    other.close()


@given(data=st.data(), at=st.integers(0, 1 << 30), flip=st.integers(1, 255))
@settings(max_examples=60)
def test_a_corrupted_entry_is_a_miss_and_gone(
    data: st.DataObject, at: int, flip: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any byte of it: of the elements, or of what they are said to be."""
    store = Store(tmp_path_factory.getbasetemp() / f"corrupt-{next(_FOLDERS)}", MUCH, SPACE)
    store.put(NAMES[0], content(0))
    path = entry(store, NAMES[0])
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= flip
    kept = data.draw(st.sampled_from([len(raw), len(raw) - 1, len(raw) // 2, 0]))
    path.write_bytes(raw[:kept] + bytes(data.draw(st.integers(0, 1))))
    assert read(store, NAMES[0]) is None
    assert store.counts().corrupted == 1
    assert not store.has(NAMES[0])
    assert store.put(NAMES[0], content(0))
    assert np.array_equal(read(store, NAMES[0]), content(0))
    store.close()


def test_an_entry_of_another_length_is_a_miss(store: Store) -> None:
    store.put(NAMES[0], content(0))
    with entry(store, NAMES[0]).open("ab") as file:
        file.write(b"more")
    assert read(store, NAMES[0]) is None
    assert store.counts().corrupted == 1


def test_an_entry_under_anothers_name_is_a_miss(store: Store) -> None:
    store.put(NAMES[0], content(0))
    store.put(NAMES[1], content(1))
    os.replace(entry(store, NAMES[0]), entry(store, NAMES[1]))
    assert read(store, NAMES[1]) is None
    assert store.counts().corrupted == 1


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model.weights", msgspec.structs.replace(SPACE, model=msgspec.structs.replace(MODEL, weights="w2"))),
        ("dtype", msgspec.structs.replace(SPACE, dtype="bfloat16")),
        ("unit", msgspec.structs.replace(SPACE, unit=4)),
    ],
)
def test_another_space_is_never_read(store: Store, tmp_path: Path, field: str, other: Space) -> None:
    """And which field differs can be said."""
    store.put(NAMES[0], content(0))
    theirs = Store(tmp_path / "store", MUCH, other)
    assert read(theirs, NAMES[0]) is None
    assert theirs.others() == [SPACE]
    assert [name for name, _, _ in prefix_space.differences(other, SPACE)] == [field]
    theirs.close()


def test_the_least_recently_used_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    size = content(0).nbytes + 72
    store = Store(tmp_path / "store", 10 * size, SPACE)
    for place in range(10):
        assert store.put(NAMES[place], content(place))
        os.utime(entry(store, NAMES[place]), (place, place))
    assert read(store, NAMES[0]) is not None
    assert store.put(NAMES[10], content(10))
    assert store.has(NAMES[0])
    assert not store.has(NAMES[1])
    assert store.counts().evicted >= 1
    for place in range(11, 60):
        assert store.put(NAMES[place], content(place))
        assert total(tmp_path / "store") <= store.used() <= 10 * size
    store.close()


def test_an_entry_larger_than_the_bound_is_not_stored(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 100, SPACE)
    assert not store.put(NAMES[0], content(0))
    assert store.counts().unstored == 1
    assert total(tmp_path / "store") == 0
    store.close()


def test_what_others_have_reserved_is_not_given_twice(tmp_path: Path) -> None:
    one, other = (Room(tmp_path / "store", 100) for _ in range(2))
    held = one.reserve(60)
    assert held is not None
    assert other.reserve(60) is None
    one.abandon(held)
    again = other.reserve(60)
    assert again is not None
    other.abandon(again)
    assert one.used() == 0
    one.close()
    other.close()


def test_concurrent_writers_and_readers(tmp_path: Path) -> None:
    """Of few names, in little room: a reader has what was written under the name, or a miss."""
    size = content(0).nbytes + 72
    stores = [Store(tmp_path / "store", 12 * size, SPACE) for _ in range(4)]
    expected = [content(place) for place in range(20)]

    def work(worker: int) -> int:
        store, draws, hits = stores[worker], np.random.default_rng(worker), 0
        for place in draws.integers(0, len(expected), 150).tolist():
            if draws.random() < 0.5:
                store.put(NAMES[place], expected[place])
            elif (found := read(store, NAMES[place])) is not None:
                assert np.array_equal(found, expected[place])
                hits += 1
        return hits

    with ThreadPoolExecutor(len(stores)) as pool:
        assert sum(pool.map(work, range(len(stores)), timeout=60)) > 0
    assert sum(store.counts().corrupted for store in stores) == 0
    assert total(tmp_path / "store") <= 12 * size
    for store in stores:
        store.close()


_DIES = """
import os, signal, sys
from pathlib import Path
from deeplink.kvconnector.prefixes.room import Room
room = Room(Path(sys.argv[1]), 1 << 20)
reserved = room.reserve(1000)
os.pwrite(reserved.descriptor, b"x" * 500, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_that_dies_leaves_nothing(store: Store, tmp_path: Path) -> None:
    """Its bytes count until somebody looks, then the file is gone; one whose maker lives stays."""
    done = subprocess.run([sys.executable, "-c", _DIES, str(tmp_path / "store")], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "store" / RESERVED).iterdir())) == 1
    assert store.used() == 1000
    assert not list(tmp_path.glob("store/*/*/*"))
    alive = store._room.reserve(200)
    assert alive is not None
    looking = Room(tmp_path / "store", MUCH)
    assert list((tmp_path / "store" / RESERVED).iterdir()) == [alive.path]
    assert looking.used() == 200
    store._room.abandon(alive)
    assert looking.used() == 0
    looking.close()


def test_a_lock_that_is_not_given_back_stops_storing_and_nothing_else(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_room, "LOCK_SECONDS", 0.05)
    store.put(NAMES[0], content(0))
    holder = Room(tmp_path / "store", MUCH)
    with holder._locked() as held:
        assert held
        assert not store.put(NAMES[1], content(1))
        assert read(store, NAMES[0]) is not None
    assert store.put(NAMES[1], content(1))
    holder.close()


def test_clearing_removes_this_space_alone(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "store", MUCH, msgspec.structs.replace(SPACE, dtype="bfloat16"))
    for one in (store, other):
        one.put(NAMES[0], content(0))
    store.clear()
    assert not store.has(NAMES[0])
    assert other.has(NAMES[0])
    assert store.used() == total(tmp_path / "store")
    other.close()


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError) as caught:
        Store(tmp_path / "open", MUCH, SPACE)
    assert caught.value.field == "path"


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        Store(tmp_path / "file", MUCH, SPACE)
    assert caught.value.field == "path"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"model": 1}', b"\xff", b"[" * 100_000])
def test_what_is_not_a_space_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        prefix_space.decode(data)


def test_a_space_goes_through_its_file() -> None:
    assert prefix_space.decode(prefix_space.encode(SPACE)) == SPACE


@pytest.mark.parametrize(
    ("field", "change"),
    [("kind", {"kind": "sliding", "window": 8}), ("scales", {"scales": Scales("tensor", (1.0, 1.0))})],
)
def test_caches_that_are_not_stored_are_refused_by_name(field: str, change: dict[str, object]) -> None:
    group = CacheGroup("full", (0, 1), HEADS, DIM, "float16", 16, "block token head (kv dim)")
    assert prefix_space.of_group(MODEL, group, UNIT) == SPACE
    with pytest.raises(ConfigError) as caught:
        prefix_space.of_group(MODEL, msgspec.structs.replace(group, **change), UNIT)
    assert caught.value.field == field


# Pages


def made(sized: Sized, store: Store) -> tuple[Pages, Cache]:
    cache = Cache(tuple(np.zeros(size, np.uint16) for size in sized.tensors * LAYERS), sized.bind())
    return Pages(cache, store), cache


@st.composite
def paged(draw: st.DrawFn, blocks: int) -> Sized:
    """Any layout with pages of whole units."""
    return draw(layouts(heads=HEADS, dim=DIM, blocks=blocks, kv=2).filter(lambda sized: sized.block_size % UNIT == 0))


@given(data=st.data(), tokens=st.integers(0, 60), seed=st.integers(0, 1 << 20))
@settings(max_examples=60)
def test_pages_of_any_size_and_layout_are_read_by_any_other(
    data: st.DataObject, tokens: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.getbasetemp() / f"pages-{next(_FOLDERS)}", MUCH, SPACE)
    draws = np.random.default_rng(seed)
    prompt = draws.integers(0, 1000, tokens).tolist()
    kv = draws.integers(0, 1 << 16, (LAYERS, 2, HEADS, tokens, DIM), np.uint16)
    ours, theirs = data.draw(paged(31)), data.draw(paged(31))
    (writer, source), (reader, target) = made(ours, store), made(theirs, store)
    named, wanted = (pages(prompt, sized.block_size, UNIT) for sized in (ours, theirs))
    table, places = (draws.permutation(31).tolist() for _ in range(2))
    whole = tokens // ours.block_size
    _fill(source, table, kv[:, :, :, : whole * ours.block_size])
    assert writer.write(named, table[: len(named)]) == [True] * whole + [False] * (len(named) - whole)
    expected = whole * ours.block_size // theirs.block_size
    assert reader.present(wanted) == expected
    assert reader.read(wanted, places[: len(wanted)]) == [True] * expected + [False] * (len(wanted) - expected)
    stop = expected * theirs.block_size
    assert np.array_equal(_content(target, places, stop), kv[:, :, :, :stop])
    common = min(whole * ours.block_size, stop)
    if common % ours.block_size == 0:
        count = common // ours.block_size
        assert writer.digest(named[:count], table[:count]) == reader.digest(wanted[:expected], places[:expected])
    store.close()


def test_a_page_with_a_corrupted_unit_ends_what_is_read(store: Store) -> None:
    pages_, _ = made(Sized("block token head (kv dim)", 4, HEADS, 4, DIM), store)
    named = pages(range(16), 4, UNIT)
    pages_.write(named, range(4))
    path = entry(store, named[1].units[0])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert pages_.read(named, range(4)) == [True, False, False, False]
    assert store.counts().corrupted == 1
    assert pages_.present(named) == 1


def test_names_of_others_are_neither_stored_nor_found(store: Store) -> None:
    """A plain text, as an engine that was not hooked into would give."""
    pages_, _ = made(Sized("block token head (kv dim)", 2, HEADS, 2, DIM), store)
    assert pages_.write(["ab" * 32], [0]) == [False]
    assert pages_.present(["ab" * 32]) == 0
    assert pages_.read([PageName("ab" * 32)], [0]) == [False]
    assert store.counts().written == 0


@pytest.mark.parametrize("change", [{"heads": 1}, {"dtype": "float32"}, {"layers": (0, 1, 2)}])
def test_a_cache_of_another_space_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    store = Store(tmp_path / "store", MUCH, msgspec.structs.replace(SPACE, **change))
    with pytest.raises(LayoutError):
        made(Sized("block token head (kv dim)", 2, HEADS, 2, DIM), store)
    store.close()


def total(folder: Path) -> int:
    """Bytes of all entries, published or not."""
    found = [*folder.glob("*/*/*"), *(folder / RESERVED).glob("*")]
    return sum(path.stat().st_size for path in found)


def _fill(cache: Cache, table: list[int], kv: np.ndarray) -> None:
    if kv.shape[3]:
        cache.scatter(np.ascontiguousarray(kv), 0, table, Chunk(0, kv.shape[3]))


def _content(cache: Cache, table: list[int], tokens: int) -> np.ndarray:
    wire = np.zeros(cache.wire_shape(tokens), cache.dtype)
    if tokens:
        cache.gather(table, Chunk(0, tokens), wire)
    return wire

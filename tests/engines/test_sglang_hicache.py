"""SGLang's hierarchical cache with deeplink's store: prefixes that one engine has cached are read by another, with
other pages and another layout in its host memory."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sglang_engine
from fleet import Fleet, Running, http, prompt

from deeplink.local import sglang, step

pytestmark = pytest.mark.long

LENGTHS = (64, 130, 200, 500, 900)
SECONDS = 20.0


@dataclass(frozen=True)
class Engines:
    """An engine with pages of 16 tokens and one with pages of 64, which share a store, and one like the second that
    caches nothing."""

    fleet: Fleet
    store: Path
    writer: Running
    reader: Running
    alone: Running


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[Engines]:
    store = fleet.folder / "prefixes"
    writer = _prepare(fleet, "hicache-writer", 16, store, "page_first")
    reader = _prepare(fleet, "hicache-reader", 64, store, "page_first_direct")
    alone = sglang_engine.prepare(fleet, "hicache-alone", "", page=64, flags=("--disable-radix-cache",))
    fleet.start(writer, reader, alone)
    yield Engines(fleet, store, writer, reader, alone)
    for one in (writer, reader, alone):
        one.process.stop()


def test_pages_of_16_are_read_as_pages_of_64(engines: Engines) -> None:
    for tokens in LENGTHS:
        ids = prompt(tokens, seed=tokens)
        _write(engines.writer, ids, tokens // 16 * 16)
        read, output = _read(engines.reader, ids)
        # The last token is always computed, so a prompt of whole pages is read but for its last page.
        assert read == (tokens - 1) // 64 * 64, tokens
        assert output == _output(engines.alone, ids), tokens


def test_and_the_other_way_round(engines: Engines) -> None:
    for tokens in LENGTHS:
        ids = prompt(tokens, seed=10_000 + tokens)
        _write(engines.reader, ids, tokens // 64 * 64)
        read, output = _read(engines.writer, ids)
        assert read == min((tokens - 1) // 16 * 16, tokens // 64 * 64), tokens
        assert output == _output(engines.alone, ids), tokens


def test_the_digests_are_those_of_the_writer(engines: Engines) -> None:
    """Of what lies in the two engines' host memory, each read by its own layout: 256 tokens, 16 pages and 4."""
    before = {one: len(_reports(one)) for one in (engines.writer, engines.reader)}
    ids = prompt(257, seed=77)
    _write(engines.writer, ids, 256)
    read, _ = _read(engines.reader, ids)
    assert read == 256
    wrote = [report for report in _reports(engines.writer)[before[engines.writer] :] if report[0] == "wrote"]
    got = [report for report in _reports(engines.reader)[before[engines.reader] :] if report[0] == "read"]
    assert sum(pages for _, pages, _ in wrote) == 16
    assert sum(pages for _, pages, _ in got) == 4
    assert _sum(wrote) == _sum(got) != 0


def test_what_is_corrupted_is_computed(engines: Engines) -> None:
    ids = prompt(300, seed=78)
    known = set(_entries(engines.store))
    _write(engines.writer, ids, 288)
    new = sorted(set(_entries(engines.store)) - known)
    assert len(new) >= 18  # pages of answers in the tests before may come as late as this
    for path in new:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    read, output = _read(engines.reader, ids)
    assert read == 0
    assert output == _output(engines.alone, ids)


def test_salts_are_kept_apart(engines: Engines) -> None:
    ids = prompt(200, seed=79)
    _write(engines.writer, ids, 192, cache_salt="one")
    assert _read(engines.reader, ids, cache_salt="two")[0] == 0
    assert _read(engines.reader, ids, cache_salt="one")[0] == 192


def test_other_weights_are_not_read(engines: Engines) -> None:
    other = _prepare(engines.fleet, "hicache-other", 16, engines.store, "page_first", model=engines.fleet.variant())
    engines.fleet.start(other)
    try:
        ids = prompt(200, seed=80)
        _write(engines.writer, ids, 192)
        assert _read(other, ids)[0] == 0
        assert "model.weights is" in other.process.log.read_text()
    finally:
        other.process.stop()


def test_once_other_weights_are_loaded_nothing_is_read_or_written(engines: Engines) -> None:
    """Last, as the engine is of no more use to the others."""
    ids, later = prompt(200, seed=81), prompt(200, seed=82)
    _write(engines.writer, ids, 192)
    body = {"model_path": str(engines.fleet.variant()), "flush_cache": True}
    answer = http(engines.reader.url + "/update_weights_from_disk", body, seconds=120)
    assert answer.status == 200, answer.data
    known = set(_entries(engines.store))
    assert _read(engines.reader, ids)[0] == 0
    _generate(engines.reader, later, 1)
    time.sleep(2)
    assert set(_entries(engines.store)) == known


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--page-size", "8"), "unit"),
        (
            ("--hicache-mem-layout", "layer_first", "--hicache-host-memory-mode", "buffer_only"),
            "hicache-host-memory-mode",
        ),
    ],
)
def test_what_is_not_supported_is_refused_at_the_start(engines: Engines, flags: tuple[str, ...], field: str) -> None:
    refused = _prepare(engines.fleet, f"hicache-{field}", 16, engines.store, "page_first", more=flags)
    refused.process.start()
    try:
        end = time.monotonic() + 100
        while f"field {field}" not in refused.process.log.read_text():
            assert time.monotonic() < end, refused.process.log.read_text()[-2000:]
            time.sleep(0.5)
    finally:
        refused.process.stop()


def test_sglangs_own_host_pools_have_the_layouts_that_are_declared(fleet: Fleet) -> None:
    """Without an engine: every layout, and what is refused."""
    inside = sglang_engine.installed()
    program = Path(__file__).with_name("host_pools.py")
    env = step.clean_environ() | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": f"{fleet.overlay}:{sglang.SHIMS}",
    }
    done = subprocess.run(
        [inside.python, program], env=env, cwd=fleet.folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert sum(line.endswith(": proven") for line in lines) == 10
    assert lines[10:] == [
        "another order: layout",
        "in use: hicache-storage-backend",
        "shuffled: layout of the device's pool",
        "layout: hicache-mem-layout",
        "kind: kind of host pool",
    ]


def _prepare(
    fleet: Fleet, name: str, page: int, store: Path, layout: str, more: tuple[str, ...] = (), **settings: Any
) -> Running:
    config = {
        "backend_name": "deeplink",
        "module_path": "sglang_deeplink.hicache",
        "class_name": "DeepLinkHiCache",
        "interface_v1": 1,
        "path": str(store),
        "gib": 1,
        "prefetch_threshold": 16,
    }
    io_backend = "direct" if layout.endswith("direct") else "kernel"
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", io_backend]
    flags += ["--hicache-mem-layout", layout, "--hicache-storage-prefetch-policy", "wait_complete"]
    flags += ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", json.dumps(config)]
    flags += ["--log-level", "debug", *more]
    return sglang_engine.prepare(fleet, name, "", page=page, flags=tuple(flags), **settings)


def _generate(engine: Running, ids: list[int], tokens: int, **fields: object) -> Any:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, **fields}
    answer = http(engine.url + "/generate", body, seconds=120)
    assert answer.status == 200, answer.data
    return answer.json


def _output(engine: Running, ids: list[int]) -> list[int]:
    output: list[int] = _generate(engine, ids, 64)["output_ids"]
    return output


def _write(engine: Running, ids: list[int], tokens: int, **fields: object) -> None:
    """Have the prompt cached, and wait until its whole pages are in the store."""
    before = _stored(engine)
    _generate(engine, ids, 1, **fields)
    end = time.monotonic() + SECONDS
    while _stored(engine) - before < tokens // 16:
        assert time.monotonic() < end, (_stored(engine) - before, tokens)
        time.sleep(0.1)


def _read(engine: Running, ids: list[int], **fields: object) -> tuple[int, list[int]]:
    """How many of the prompt's tokens were read from the store, and 64 tokens of output."""
    answer = _generate(engine, ids, 64, **fields)
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return int(details.get("storage", 0)), answer["output_ids"]


_REPORT = re.compile(r"(wrote|read) (\d+) of \d+ pages, digest ([0-9a-f]{16}), .*'written': (\d+), 'kept': (\d+)")


def _reports(engine: Running) -> list[tuple[str, int, int]]:
    """What the engine has written and read: how many pages, and their digest."""
    found = _REPORT.findall(engine.process.log.read_text())
    return [(what, int(pages), int(digest, 16)) for what, pages, digest, _, _ in found]


def _stored(engine: Running) -> int:
    """Units that this engine has stored, or found stored."""
    found = _REPORT.findall(engine.process.log.read_text())
    return int(found[-1][3]) + int(found[-1][4]) if found else 0


def _sum(reports: list[tuple[str, int, int]]) -> int:
    return sum(digest for _, _, digest in reports) % (1 << 64)


def _entries(store: Path) -> Iterator[Path]:
    return store.glob("????????????????????????????????/*/*")

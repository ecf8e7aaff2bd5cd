"""The command line and environment of an engine."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from deeplink.config import CONTROL_OFFSET, control_port
from deeplink.errors import LocalError
from deeplink.local import engines
from deeplink.local.engines import Engine


def engine(**fields: object) -> Engine:
    return Engine(**{"name": "a", "role": "prefill", "port": 8100, "model": Path("/m")} | fields)  # type: ignore[arg-type]


def test_flags_of_a_deeplink_engine() -> None:
    words = engines.arguments(engine(config=Path("/c.toml"), block_size=64, dtype="bfloat16"))
    text = " ".join(words)
    assert words[:2] == ["serve", "/m"]
    assert "--platform deeplink --deeplink-role prefill --deeplink-config /c.toml" in text
    assert "--kv-cache-memory-bytes 268435456" in text
    assert "--dtype bfloat16 --block-size 64 --enforce-eager" in text


def test_plain_vllm_has_none_of_our_flags() -> None:
    text = " ".join(engines.arguments(engine(role="", flags=("--kv-transfer-config", "{}"))))
    assert "deeplink" not in text
    assert text.endswith("--kv-transfer-config {}")


def test_pinned_or_left_alone() -> None:
    pinned = engines.variables(engine(core=1, env={"OMP_NUM_THREADS": "2"}), Path("/o"))
    assert pinned["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert pinned["OMP_NUM_THREADS"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in pinned
    assert pinned["PYTHONPATH"] == "/o"
    assert engines.variables(engine(), Path("/o"))["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_cores_are_ones_this_process_may_use() -> None:
    usable = os.sched_getaffinity(0)
    assert set(engines.cores(1)) <= usable
    assert engines.cores(len(usable) + 1) == [None] * (len(usable) + 1)


def test_free_ports_come_with_free_control_ports() -> None:
    ports = engines.free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        for number in (port, control_port(port)):
            engines.require_free(number)


def test_a_port_that_was_given_is_not_given_again_before_its_engine_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its control port. An engine takes half a minute to bind them, and another is prepared meanwhile."""
    (low,) = engines.free_ports(1)
    chosen = [low, low - CONTROL_OFFSET, low + CONTROL_OFFSET]

    class Dice:
        def sample(self, candidates: range, count: int) -> list[int]:
            return [*chosen, *random.sample(candidates, count)]

    monkeypatch.setattr(random, "SystemRandom", Dice)
    assert not set(chosen) & set(engines.free_ports(2))


def test_a_port_in_use_is_refused_by_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LocalError, match=f"port {port} of 127.0.0.1 is in use"):
            engines.require_free(port)

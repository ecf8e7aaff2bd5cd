"""`deeplink demo --once --json`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fleet import Fleet


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("vllm", "vllm"),
        pytest.param("vllm", "sglang", marks=pytest.mark.long),
        pytest.param("sglang", "vllm", marks=pytest.mark.long),
    ],
)
def test_demo_once(fleet: Fleet, prefill: str, decode: str) -> None:
    kinds = ["--prefill", prefill, "--decode", decode]
    done = subprocess.run(
        [sys.executable, "-m", "deeplink.cli", "demo", "--once", "--json", *kinds],
        capture_output=True,
        text=True,
        timeout=500,
        env=dict(os.environ),
        cwd=fleet.folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["agreement"] == "exact"
    assert (report["prefill"]["engine"], report["decode"]["engine"]) == (prefill, decode)
    assert (report["prefill"]["block_size"], report["decode"]["block_size"]) == (64, 128)
    assert len(report["requests"]) >= 4
    for request in report["requests"]:
        assert request["path"] == "handoff"
        assert request["tokens_equal"] is True
        assert request["kv_bytes"] > 0
        assert request["digest"]
        assert 5 <= request["prompt_tokens"] <= 500
    assert report["leaks"] == {"blocks": 0, "staging_bytes": 0, "claims": 0}

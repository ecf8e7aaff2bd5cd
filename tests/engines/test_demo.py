"""`deeplink demo --once --json`, as a user runs it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
from fleet import Fleet

from deeplink.local.kinds import KINDS

PAIRS = tuple(itertools.product(KINDS, KINDS))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("vllm", "vllm"),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS if pair != ("vllm", "vllm")),
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
    equal = [request["tokens_equal"] for request in report["requests"]]
    if "lmdeploy" in (prefill, decode):  # in 16 bits
        assert sum(equal) > len(equal) / 2
    else:
        assert all(equal)
    for request in report["requests"]:
        assert request["path"] == "handoff"
        assert request["kv_bytes"] > 0
        assert request["digest"]
        assert 5 <= request["prompt_tokens"] <= 500
    assert report["leaks"] == {"blocks": 0, "staging_bytes": 0, "claims": 0}

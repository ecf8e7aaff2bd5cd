"""`deeplink demo --once --json`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from fleet import Fleet


def test_demo_once(fleet: Fleet) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deeplink.cli", "demo", "--once", "--json"],
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
    assert (report["prefill"]["block_size"], report["decode"]["block_size"]) == (64, 128)
    assert len(report["requests"]) >= 4
    for request in report["requests"]:
        assert request["path"] == "handoff"
        assert request["tokens_equal"] is True
        assert request["kv_bytes"] > 0
        assert request["digest"]
        assert 5 <= request["prompt_tokens"] <= 500
    assert report["leaks"] == {"blocks": 0, "staging_bytes": 0, "claims": 0}

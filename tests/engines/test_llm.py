"""An engine that ``LLM(...)`` makes: no command line, no API, and a control endpoint all the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from fleet import Fleet

from deeplink.local import engines


def test_llm(fleet: Fleet) -> None:
    (port,) = engines.free_ports(1)
    table = {"role": "decode", "config": str(fleet.config), "control-port": port}
    program = Path(__file__).with_name("ask_llm.py")
    command = [fleet.environment.folder / "bin" / "python", program, fleet.tiny("hybrid"), str(port), json.dumps(table)]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **quiet, **threads, "PYTHONPATH": str(fleet.overlay)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env, cwd=fleet.folder)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"role"'))
    found = json.loads(line)
    assert found["role"] == "decode"
    assert len(found["tokens"]) == 4

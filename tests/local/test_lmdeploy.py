"""What LMDeploy on CPU is started with. That it starts is seen by the tests with real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeplink.errors import LocalError
from deeplink.local import environment, lmdeploy
from deeplink.local.engines import Engine
from deeplink.local.kinds import KINDS, common_dtype

NEW = {"hidden_size": 8, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}


def engine(role: str, **more: object) -> Engine:
    return Engine(name="e", role=role, port=8000, model=Path("/m"), block_size=16, **more)  # type: ignore[arg-type]


def write(folder: Path, config: dict[str, object], tokenizer: str = "PreTrainedTokenizerFast") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("role", ["prefill", "decode", ""])
def test_only_an_engine_with_a_role_disaggregates(role: str) -> None:
    words = lmdeploy.arguments(engine(role), Path("/m"))
    assert words[words.index("--cache-block-seq-len") + 1] == "16"
    assert words[words.index("--num-gpu-blocks") + 1] == str(4 * 1024 // 16)
    assert ("--migration-backend" in words) == bool(role)
    if role:
        assert words[words.index("--role") + 1] == role.capitalize()


def test_what_is_given_comes_last_and_so_overrides() -> None:
    given = engine("prefill", flags=("--session-len", "64"), env={"OMP_NUM_THREADS": "2"}, config=Path("/c"))
    assert lmdeploy.arguments(given, Path("/m"))[-2:] == ["--session-len", "64"]
    found = lmdeploy.variables(given, Path("/overlay"))
    assert (found["OMP_NUM_THREADS"], found["DEEPLINK_CONFIG"]) == ("2", "/c")
    assert "DEEPLINK_CONFIG" not in lmdeploy.variables(engine(""), Path("/overlay"))


def test_a_model_of_transformers_5_is_read_by_4(tmp_path: Path) -> None:
    model = write(tmp_path / "model", NEW, "TokenizersBackend")
    for _ in range(2):  # a second start finds the first one's
        seen = lmdeploy.readable(model, tmp_path / "view")
    assert json.loads((seen / "config.json").read_text()) == {
        "hidden_size": 8,
        "rope_theta": 1e5,
        "rope_scaling": None,
    }
    assert json.loads((seen / "tokenizer_config.json").read_text()) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert (seen / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((model / "config.json").read_text()) == NEW


def test_scaled_position_encodings_stay_scaled(tmp_path: Path) -> None:
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    seen = lmdeploy.readable(write(tmp_path / "model", {"rope_parameters": rope}), tmp_path / "view")
    assert json.loads((seen / "config.json").read_text()) == {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }


def test_a_model_of_transformers_4_is_taken_as_it_is(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {"rope_theta": 1e4})
    assert lmdeploy.readable(model, tmp_path / "view") == model


def test_position_encodings_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(LocalError, match="differ by layer"):
        lmdeploy.readable(write(tmp_path / "model", {"rope_parameters": rope}), tmp_path / "view")


def test_its_kind() -> None:
    assert KINDS["lmdeploy"].lock("") is environment.LMDEPLOY_CPU
    assert common_dtype(KINDS["vllm"], KINDS["sglang"]) == "float32"
    for name in KINDS:
        assert common_dtype(KINDS[name], KINDS["lmdeploy"]) == common_dtype(KINDS["lmdeploy"], KINDS[name]) == "float16"

"""The fingerprint of a checkpoint: its tensors, not its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from deeplink.errors import ConfigError
from deeplink.kvconnector.contracts.weights import INDEX, SAMPLE_BYTES, SAMPLES, examine, fingerprint

Tensors = dict[str, np.ndarray]


def write(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """The safetensors format by hand: u64 header length, JSON header, data."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at, data = 0, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
        data += tensor.tobytes()
    write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def tensors() -> Tensors:
    rng = np.random.default_rng(0)
    shapes = {"a.weight": (64, 100), "b.bias": (3,), "c.weight": (1000,), "scalar": (), "empty": (0, 4)}
    return {name: rng.random(shape, np.float32) for name, shape in shapes.items()}


def folder(path: Path, *shards: Tensors, **kwargs: dict[str, str]) -> Path:
    path.mkdir()
    for index, shard in enumerate(shards):
        write(path / f"model-{index:05}-of-{len(shards):05}.safetensors", shard, **kwargs)
    return path


def split(whole: Tensors, *names: tuple[str, ...]) -> list[Tensors]:
    return [{name: whole[name] for name in part} for part in names]


def test_files_order_and_metadata_do_not_enter(tmp_path: Path) -> None:
    whole = tensors()
    names = list(whole)
    expected = fingerprint(folder(tmp_path / "one", whole))
    assert expected.startswith("sampled:")
    assert len(expected) == len("sampled:") + 32
    backwards = {name: whole[name] for name in reversed(names)}
    assert fingerprint(folder(tmp_path / "backwards", backwards)) == expected
    assert fingerprint(folder(tmp_path / "metadata", whole, metadata={"format": "pt"})) == expected
    for cut in range(1, len(names)):
        shards = split(whole, tuple(names[cut:]), tuple(names[:cut]))
        assert fingerprint(folder(tmp_path / f"cut{cut}", *shards)) == expected
    assert fingerprint(folder(tmp_path / "each", *split(whole, *[(name,) for name in names]))) == expected


def _changes() -> dict[str, Tensors]:
    def edited(name: str, index: int) -> Tensors:
        whole = tensors()
        flat = whole[name].reshape(-1)
        flat[index] += 1
        return whole

    whole = tensors()
    third = whole["a.weight"].nbytes // 4 // 3 - SAMPLE_BYTES // 4 // 3
    return {
        "first value": edited("a.weight", 0),
        "last value": edited("a.weight", -1),
        "a value a third in": edited("a.weight", third + 5),
        "a small tensor": edited("b.bias", 1),
        "a scalar": edited("scalar", 0),
        "a shape": {**whole, "a.weight": whole["a.weight"].reshape(100, 64)},
        "a name": {("z.bias" if name == "b.bias" else name): value for name, value in whole.items()},
        "one more": {**whole, "d": np.zeros(1, np.float32)},
        "one less": {name: value for name, value in whole.items() if name != "empty"},
        "two swapped": {**whole, "a.weight": whole["a.weight"][::-1].copy()},
    }


@pytest.mark.parametrize("change", _changes())
def test_other_weights_have_another(tmp_path: Path, change: str) -> None:
    expected = fingerprint(folder(tmp_path / "a", tensors()))
    assert fingerprint(folder(tmp_path / "b", _changes()[change])) != expected


def _entry(**changes: object) -> bytes:
    return json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}).encode()


def _broken(path: Path, fault: str) -> None:
    good = _entry()
    {
        "empty": lambda: path.write_bytes(b""),
        "no header": lambda: path.write_bytes(b"\x08\0\0"),
        "truncated header": lambda: write_raw(path, good, length=len(good) + 9),
        "huge header": lambda: write_raw(path, good, length=1 << 60),
        "not json": lambda: write_raw(path, b"\xff" * 20),
        "not an object": lambda: write_raw(path, b"[1, 2]"),
        "not objects": lambda: write_raw(path, b'{"x": 1}'),
        "deep json": lambda: write_raw(path, b'{"x": {"y": ' + b"[" * 100_000),
        "truncated data": lambda: write_raw(path, good, b"abc"),
        "no offsets": lambda: write_raw(path, b'{"x": {"dtype": "F32", "shape": [1]}}', b"1234"),
        "three offsets": lambda: write_raw(path, _entry(data_offsets=[0, 1, 2]), b"1234"),
        "text offsets": lambda: write_raw(path, _entry(data_offsets=["0", "4"]), b"1234"),
        "backward offsets": lambda: write_raw(path, _entry(data_offsets=[4, 0]), b"1234"),
        "negative offsets": lambda: write_raw(path, _entry(data_offsets=[-400, -396]), b"1234"),
        "huge offsets": lambda: write_raw(path, _entry(data_offsets=[1 << 63, (1 << 63) + 4]), b"1234"),
        "fractions": lambda: write_raw(path, _entry(data_offsets=[0.5, 4.5]), b"1234"),
        "dangling link": lambda: path.symlink_to(path.with_name("gone")),
        "a folder": path.mkdir,
    }[fault]()


@pytest.mark.parametrize(
    "fault",
    [
        "empty",
        "no header",
        "truncated header",
        "huge header",
        "not json",
        "not an object",
        "not objects",
        "deep json",
        "truncated data",
        "no offsets",
        "three offsets",
        "text offsets",
        "backward offsets",
        "negative offsets",
        "huge offsets",
        "fractions",
        "dangling link",
        "a folder",
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, fault: str) -> None:
    write(tmp_path / "a.safetensors", tensors())
    _broken(tmp_path / "b.safetensors", fault)
    with pytest.raises(ConfigError, match=r"b\.safetensors") as caught:
        fingerprint(tmp_path)
    assert caught.value.field == "model.weights"


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        ((), "holds no"),
        (("README.md",), "holds no"),
        (("pytorch_model.bin",), "PyTorch pickle but no"),
        (("consolidated.00.pth", "pytorch_model.bin"), "holds PyTorch pickle but no"),
        (("model-q4.gguf",), "holds GGUF but no"),
    ],
)
def test_a_checkpoint_without_safetensors_is_told_what_to_do(tmp_path: Path, holds: tuple[str, ...], said: str) -> None:
    for name in holds:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=said) as caught:
        fingerprint(tmp_path)
    assert caught.value.field == "model.weights"
    assert "safetensors" in caught.value.remedy


def test_a_single_file_and_a_name_of_a_hub_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    with pytest.raises(ConfigError, match="GGUF"):
        fingerprint(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="not a folder"):
        fingerprint(Path("someone/model"))


def indexed(path: Path, weight_map: dict[str, str]) -> Path:
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    """Some checkpoints lie twice in one folder, as shards and consolidated; engines load what the index names."""
    whole = tensors()
    names = list(whole)
    expected = fingerprint(folder(tmp_path / "plain", whole))
    path = folder(tmp_path / "both", *split(whole, tuple(names[2:]), tuple(names[:2])))
    shards = sorted(path.glob("*.safetensors"))
    write(path / "consolidated.safetensors", whole)
    assert fingerprint(path) != expected
    weight_map = {name: shards[name in names[:2]].name for name in names}
    assert fingerprint(indexed(path, weight_map)) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"more": "model-00001-of-00001.safetensors"}, "no file model-00001-of-00001"),
        ({"more": "../a/model-00000-of-00001.safetensors"}, "no file"),
        ({"more": ""}, "no file"),
        ({"more": "x" * 300}, "no file x"),
        ({"more": "a\0b"}, "no file"),
        ({"more": "model-00000-of-00001.safetensors"}, "no tensor more"),
    ],
)
def test_an_index_names_what_is_missing(tmp_path: Path, change: dict[str, str], said: str) -> None:
    path = folder(tmp_path / "a", tensors())
    weight_map = dict.fromkeys(tensors(), "model-00000-of-00001.safetensors")
    with pytest.raises(ConfigError, match=said) as caught:
        fingerprint(indexed(path, {**weight_map, **change}))
    assert INDEX in str(caught.value)
    assert "download" in caught.value.remedy


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    path = folder(tmp_path / "a", tensors())
    (path / INDEX).write_text(text)
    with pytest.raises(ConfigError, match="not an index"):
        fingerprint(path)


def test_it_says_what_it_did_not_see(tmp_path: Path) -> None:
    found = examine(folder(tmp_path / "a", tensors()))
    sizes = [tensor.nbytes for tensor in tensors().values()]
    seen = sum(min(size, SAMPLES * SAMPLE_BYTES) for size in sizes)
    assert (found.tensors, found.size, found.sampled) == (5, sum(sizes), seen)
    assert found.share == seen / sum(sizes)
    assert f"{seen} of {sum(sizes)} bytes; not seen: the other {sum(sizes) - seen} bytes" in str(found)
    assert fingerprint(tmp_path / "a") == found.text


def test_a_change_between_the_samples_is_not_seen(tmp_path: Path) -> None:
    """The limit that is stated, so that nobody takes the fingerprint for a checksum."""
    whole, edited = tensors(), tensors()
    edited["a.weight"].reshape(-1)[SAMPLE_BYTES // 4 + 10] += 1
    assert fingerprint(folder(tmp_path / "a", whole)) == fingerprint(folder(tmp_path / "b", edited))


def test_large_files_are_not_read_whole(tmp_path: Path) -> None:
    """A sparse file of 64 GiB takes no longer than a small one, and its end still counts."""
    size = 64 << 30
    header = _entry(shape=[size // 4], data_offsets=[0, size])
    found = set()
    for name, last in (("a", b"\0"), ("b", b"\1")):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.safetensors"
        write_raw(path, header)
        os.truncate(path, 8 + len(header) + size)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(last)
        found.add(fingerprint(path.parent))
    assert len(found) == 2

"""What a request's prompt is told apart by. The requests are as much of vLLM's as is looked at."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deeplink.errors import Refused
from deeplink.kvconnector.contracts.prompt import check_same
from vllm_deeplink.identity import SETTINGS, adapter, identity, note


def request(**more: Any) -> Any:
    bare = {"prompt_token_ids": [1, 2, 3], "prompt_embeds": None, "cache_salt": None, "lora_request": None}
    return SimpleNamespace(**{**bare, "mm_features": [], **more})


def image(identifier: str, offset: int = 1, length: int = 2) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def lora(folder: Path, value: bytes = b"\x01", settings: str = '{"r": 8}', name: str = "a") -> Any:
    """A request's adapter, with one tensor in its file."""
    folder.mkdir(exist_ok=True)
    header = json.dumps({"lora_A.weight": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + value)
    (folder / SETTINGS).write_text(settings)
    return SimpleNamespace(lora_name=name, lora_path=str(folder))


def differing(ours: Any, theirs: Any) -> str:
    try:
        check_same(identity(ours), identity(theirs))
    except Refused as exc:
        return exc.field
    return ""


def test_what_differs_has_its_name() -> None:
    assert differing(request(), request()) == ""
    assert differing(request(), request(prompt_token_ids=[1, 2])) == "prompt"
    assert differing(request(cache_salt="a"), request(cache_salt="b")) == "cache_salt"
    assert differing(request(cache_salt="a"), request()) == "cache_salt"
    assert differing(request(mm_features=[image("x")]), request(mm_features=[image("y")])) == "media"
    assert differing(request(mm_features=[image("x")]), request(mm_features=[image("x", offset=2)])) == "media"
    assert differing(request(mm_features=[image("x")]), request(mm_features=[image("x", length=3)])) == "media"
    assert differing(request(mm_features=[image("x")]), request(mm_features=[image("x"), image("x")])) == "media"
    assert differing(request(mm_features=[image("x")]), request(mm_features=[image("x")])) == ""


def test_an_adapter_is_its_weights_not_its_name(tmp_path: Path) -> None:
    ours = request(lora_request=lora(tmp_path / "a"))
    assert differing(ours, request(lora_request=lora(tmp_path / "b", name="another name"))) == ""
    assert differing(ours, request(lora_request=lora(tmp_path / "c", b"\x02"))) == "lora"
    assert differing(ours, request(lora_request=lora(tmp_path / "d", settings='{"r": 16}'))) == "lora"
    assert differing(ours, request()) == "lora"


@pytest.mark.parametrize("noted", [True, False])
def test_an_adapter_that_is_replaced_in_place(tmp_path: Path, noted: bool) -> None:
    """The engine may go on with what it has read, whichever way it has first heard of it."""
    given = lora(tmp_path / "a")
    note(given) if noted else adapter(given)
    before = adapter(given)
    lora(tmp_path / "a", b"\x02")
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    note(given)  # loaded again: the cache has what the first one came to
    with pytest.raises(Refused) as caught:
        identity(request(lora_request=given))
    assert (caught.value.field, caught.value.ours) == ("lora", given.lora_path)
    assert adapter(lora(tmp_path / "b", b"\x02")) != before


def test_an_adapter_that_is_not_there_when_it_is_noted(tmp_path: Path) -> None:
    given = lora(tmp_path / "a")
    (tmp_path / "a" / SETTINGS).rename(tmp_path / "elsewhere")
    note(given)
    (tmp_path / "elsewhere").rename(tmp_path / "a" / SETTINGS)
    assert adapter(given)


@pytest.mark.parametrize("lacks", ["adapter_model.safetensors", SETTINGS, ""])
def test_an_adapter_that_cannot_be_read(tmp_path: Path, lacks: str) -> None:
    given = lora(tmp_path / "a")
    if lacks:
        (tmp_path / "a" / lacks).unlink()
    else:
        given.lora_path = str(tmp_path / "nothing")
    with pytest.raises(Refused) as caught:
        identity(request(lora_request=given))
    assert (caught.value.field, caught.value.ours) == ("lora", given.lora_path)
    assert SETTINGS in caught.value.remedy


def test_embeddings_are_refused() -> None:
    with pytest.raises(Refused) as caught:
        identity(request(prompt_token_ids=None, prompt_embeds=object()))
    assert caught.value.field == "prompt_embeds"

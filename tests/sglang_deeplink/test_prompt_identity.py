"""What of a request of SGLang its cache depends on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deeplink.errors import Refused
from deeplink.kvconnector.contracts.prompt import prompt_digest
from sglang_deeplink import prompt


def request(**fields: object) -> SimpleNamespace:
    none = dict.fromkeys(("lora_id", "multimodal_inputs", "input_embeds", "positional_embed_overrides", "cache_salt"))
    return SimpleNamespace(
        **{**none, "return_sampling_mask": False, "extra_key": None, "origin_input_ids": [1, 2, 3], **fields}
    )


def test_it_is_that_of_other_engines() -> None:
    assert prompt.identity(request()) == prompt_digest([1, 2, 3])
    assert prompt.identity(request(cache_salt="s")) == prompt_digest([1, 2, 3], ["salt=s"])


def test_another_key_is_another_prompt() -> None:
    assert prompt.identity(request(extra_key="k")) not in (prompt_digest([1, 2, 3]), prompt_digest([1, 2, 3], ["k"]))


@pytest.mark.parametrize(
    "fields", [{"lora_id": "a"}, {"multimodal_inputs": object()}, {"input_embeds": [0]}, {"return_sampling_mask": True}]
)
def test_what_has_no_equal_elsewhere_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(Refused) as refused:
        prompt.identity(request(**fields))
    assert refused.value.field in ("lora", *fields)

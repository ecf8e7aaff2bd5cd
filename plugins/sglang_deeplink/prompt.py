"""What of a request its cache depends on, and what keeps it from being handed over."""

from __future__ import annotations

from typing import Any

from deeplink.kvconnector.contracts.prompt import not_handed_over, prompt_digest


def identity(req: Any) -> bytes:
    """The prompt's tokens and whatever else SGLang keys its cache by. Raises Refused for what is keyed otherwise."""
    for field, value in (
        ("lora", req.lora_id),
        ("multimodal_inputs", req.multimodal_inputs),
        ("input_embeds", req.input_embeds),
        ("positional_embed_overrides", req.positional_embed_overrides),
        ("return_sampling_mask", req.return_sampling_mask),
    ):
        if value is not None and value is not False:
            raise not_handed_over(field)
    extra = [f"salt={req.cache_salt}"] if req.cache_salt else []
    if req.extra_key:
        extra.append(f"sglang={req.extra_key}")
    return prompt_digest(req.origin_input_ids, extra)

"""Which prompt a request of vLLM is: its tokens, and what vLLM keys its blocks by beside them.

vLLM keys by an adapter's name and path, which say nothing between two hosts; here it is the adapter's own weights and
settings. Media go by vLLM's hash of them and their place in the prompt, as they do there.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.errors import ConfigError, Refused
from deeplink.kvconnector import weights
from deeplink.kvconnector.prompt import prompt_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

SETTINGS = "adapter_config.json"


def identity(request: Request) -> bytes:
    """Raises Refused for what has no identity that another engine could know: embeddings, unreadable adapters."""
    if request.prompt_embeds is not None:
        raise Refused(
            "a prompt that is given as embeddings is not handed over",
            field="prompt_embeds",
            remedy="send it to one engine, past the router's handoffs",
        )
    extra = [f"salt={request.cache_salt}"] if request.cache_salt else []
    if request.lora_request is not None:
        extra.append(f"lora={adapter(request.lora_request)}")
    for feature in request.mm_features or ():
        place = feature.mm_position
        extra.append(f"media={feature.identifier}@{place.offset}+{place.length}")
    return prompt_digest(request.prompt_token_ids or (), extra)


def adapter(request: LoRARequest) -> str:
    """What an adapter does to the cache: a fingerprint of its weights, and its settings. Raises Refused."""
    try:
        folder = Path(request.lora_path).expanduser()
        files = (*sorted(folder.glob("*.safetensors")), folder / SETTINGS)
        stamps = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files)
        return _adapter(folder, stamps)
    except (ConfigError, OSError) as exc:
        raise Refused(
            f"the adapter {request.lora_name} cannot be told from others: {exc}",
            field="lora",
            ours=request.lora_path,
            remedy=f"give it as a folder of safetensors with its {SETTINGS}",
        ) from exc


@lru_cache(maxsize=256)
def _adapter(folder: Path, stamps: tuple[tuple[int, int], ...]) -> str:
    """Read once for each state that its files are in, which `stamps` are."""
    settings = hashlib.blake2b((folder / SETTINGS).read_bytes(), digest_size=16).hexdigest()
    return f"{weights.fingerprint(folder)} {settings}"

"""Which prompt a request of vLLM is: its tokens, and what vLLM keys its blocks by beside them.

vLLM keys by an adapter's name and path, which say nothing between two hosts; here it is the adapter's own weights and
settings. vLLM reads an adapter's files once, and its cache outlives them, so an adapter whose files have changed since
has no identity. Media go by vLLM's hash of them and their place in the prompt, as they do there.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.errors import ConfigError, Refused
from deeplink.kvconnector.contracts import weights
from deeplink.kvconnector.contracts.prompt import prompt_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

SETTINGS = "adapter_config.json"

Stamps = tuple[tuple[int, int], ...]
"""The state that an adapter's files are in: of each the time of its last change, and its size."""

_first: dict[Path, Stamps] = {}
"""In which state an adapter's files were when this process first heard of it, which is before vLLM reads them."""


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


def note(request: LoRARequest) -> None:
    """vLLM is about to load this adapter."""
    try:
        folder = Path(request.lora_path).expanduser()
        _first.setdefault(folder, _stamps(folder))
    except OSError:
        pass  # vLLM says so itself, and a prompt with it is refused


def adapter(request: LoRARequest) -> str:
    """What an adapter does to the cache: a fingerprint of its weights, and its settings. Raises Refused."""
    try:
        folder = Path(request.lora_path).expanduser()
        stamps = _stamps(folder)
        found = _adapter(folder, stamps)
    except (ConfigError, OSError) as exc:
        raise Refused(
            f"the adapter {request.lora_name} cannot be told from others: {exc}",
            field="lora",
            ours=request.lora_path,
            remedy=f"give it as a folder of safetensors with its {SETTINGS}",
        ) from exc
    if _first.setdefault(folder, stamps) != stamps:
        raise Refused(
            f"the files of the adapter {request.lora_name} have changed since this engine loaded it",
            field="lora",
            ours=request.lora_path,
            remedy="give the new one as another folder, under another name, or start the engine again",
        )
    return found


def _stamps(folder: Path) -> Stamps:
    files = (*sorted(folder.glob("*.safetensors")), folder / SETTINGS)
    return tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files)


@lru_cache(maxsize=256)
def _adapter(folder: Path, stamps: Stamps) -> str:
    """Read once for each state that its files are in, which `stamps` are."""
    settings = hashlib.blake2b((folder / SETTINGS).read_bytes(), digest_size=16).hexdigest()
    return f"{weights.fingerprint(folder)} {settings}"

"""Which prompt a cache belongs to: its token ids, and whatever else the engine keys its blocks by."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deeplink.errors import Refused

TOKEN_BYTES, KEY_BYTES = 16, 8


class _Key(NamedTuple):
    """`field` is what a difference is called in a refusal."""

    field: str
    remedy: str


TOKENS = _Key("prompt", "serve the same tokenizer and chat template on both engines")
KEYS = {
    "salt": _Key("cache_salt", "send both engines the same cache_salt"),
    "lora": _Key("lora", "load the same adapter on both engines"),
    "media": _Key("media", "use the same image processor and the same hash of media on both engines"),
}
"""What has a name of its own beside the tokens."""
OTHER = _Key("block keys", "hand over between engines that key their blocks alike")
_PLACES = (TOKENS, *KEYS.values(), OTHER)
DIGEST_BYTES = TOKEN_BYTES + KEY_BYTES * (len(KEYS) + 1)


def prompt_digest(token_ids: Sequence[int], extra: Iterable[str] = ()) -> bytes:
    """48 bytes that two engines share only for the same prompt: 16 of its tokens, and 8 of each of KEYS and of what is
    none of them, so that a difference has a name.

    `extra` holds image hashes, the adapter, the cache salt: everything but the tokens that changes the KV, as
    ``name=value``; several of one name in their order.
    """
    digest = hashlib.blake2b(digest_size=TOKEN_BYTES)
    digest.update(len(token_ids).to_bytes(8, "little"))
    digest.update(array("q", token_ids).tobytes())
    by_name: dict[str, list[str]] = {name: [] for name in (*KEYS, "")}
    for text in extra:
        name = text.partition("=")[0]
        by_name[name if name in KEYS else ""].append(text)
    return digest.digest() + b"".join(map(_short, by_name.values()))


def not_handed_over(field: str) -> Refused:
    """Of a request whose cache depends on what is in no digest yet, or whose answer on what no handoff carries."""
    return Refused(
        "a request of this kind is not handed over by this release",
        field=field,
        ours="set",
        theirs="not set",
        remedy="send it to an engine that serves it alone",
    )


def check_same(ours: bytes, theirs: bytes) -> None:
    """Raises Refused for two prompts that are not one, by the name of what differs."""
    if ours == theirs:
        return
    key, mine, other = TOKENS, ours, theirs
    if len(ours) == len(theirs) == DIGEST_BYTES:
        pairs = zip(_PLACES, _parts(ours), _parts(theirs), strict=True)
        key, mine, other = next(pair for pair in pairs if pair[1] != pair[2])
    raise Refused(
        f"the two engines do not have the same {key.field}",
        field=key.field,
        ours=mine.hex(),
        theirs=other.hex(),
        remedy=key.remedy,
    )


def _short(texts: Sequence[str]) -> bytes:
    """Zeros for what the prompt does not have."""
    if not texts:
        return bytes(KEY_BYTES)
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for text in texts:
        data = text.encode(errors="surrogatepass")  # a client chooses the salt; it need not be valid Unicode
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _parts(whole: bytes) -> list[bytes]:
    starts = range(TOKEN_BYTES, DIGEST_BYTES, KEY_BYTES)
    return [whole[:TOKEN_BYTES], *(whole[start : start + KEY_BYTES] for start in starts)]

"""Which prompt a cache belongs to: its token ids, and whatever else the engine keys its blocks by."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

from deeplink.errors import Refused

DIGEST_BYTES = 16
KEY_BYTES = 8

KEYS = {
    "cache_salt": "send both engines the same cache_salt",
    "lora": "load the same adapter on both engines",
    "media": "use the same image processor and the same hash of media on both engines",
}
"""What an identity tells apart beside the tokens, in this order, and what to do about a difference."""
TOKENS = "prompt"


def prompt_digest(token_ids: Sequence[int], extra: Iterable[str] = ()) -> bytes:
    """16 bytes that two engines share only for the same prompt.

    `extra` holds image hashes, the LoRA name, the cache salt: everything but the tokens that changes the KV.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(len(token_ids).to_bytes(8, "little"))
    digest.update(array("q", token_ids).tobytes())
    for text in extra:
        data = text.encode(errors="surrogatepass")  # a client chooses the salt; it need not be valid Unicode
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def identity(token_ids: Sequence[int], keys: Mapping[str, str]) -> bytes:
    """The digest of the tokens, and a short one for each of KEYS, so that a difference has a name.

    `keys` has those that the prompt has; an empty text is not the same as none.
    """
    return prompt_digest(token_ids) + b"".join(_short(keys.get(name)) for name in KEYS)


def check_same(ours: bytes, theirs: bytes) -> None:
    """Raises Refused for two prompts that are not one, by the name of what differs."""
    if ours == theirs:
        return
    field, mine, other = TOKENS, ours, theirs
    whole = len(ours) == len(theirs) == DIGEST_BYTES + KEY_BYTES * len(KEYS)
    if whole and ours[:DIGEST_BYTES] == theirs[:DIGEST_BYTES]:
        for place, name in enumerate(KEYS):
            start = DIGEST_BYTES + KEY_BYTES * place
            mine, other = (one[start : start + KEY_BYTES] for one in (ours, theirs))
            if mine != other:
                field = name
                break
    raise Refused(
        f"the two engines do not have the same {field}",
        field=field,
        ours=mine.hex(),
        theirs=other.hex(),
        remedy=KEYS.get(field, "serve the same tokenizer and chat template on both engines"),
    )


def _short(text: str | None) -> bytes:
    """Zeros for what the prompt does not have."""
    if text is None:
        return bytes(KEY_BYTES)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()

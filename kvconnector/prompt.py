"""Which prompt a cache belongs to: its token ids, and whatever else the engine keys its blocks by."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

DIGEST_BYTES = 16


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

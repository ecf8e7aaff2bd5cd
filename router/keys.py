"""Keys that clients and operators show as bearer tokens. Comparing takes as long for a wrong key as for a right one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from deeplink.errors import ConfigError

MIN_LENGTH = 16


class Keys:
    """A set of keys, any of which opens."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.digests = tuple(_digest(key) for key in keys)

    @staticmethod
    def of(digests: Iterable[bytes]) -> Keys:
        """The set of which these are the `digests`."""
        made = Keys(())
        made.digests = tuple(digests)
        return made

    def open_with(self, authorization: str) -> bool:
        """Whether the value of an Authorization header holds one of the keys."""
        return self.open_with_bytes(authorization.encode(errors="surrogateescape"))

    def open_with_bytes(self, authorization: bytes) -> bool:
        """The same for the value as it came."""
        scheme, _, given = authorization.partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        found = False
        for known in self.digests:
            found |= hmac.compare_digest(digest, known)
        return found and scheme.lower() == b"bearer"


def load(path: Path | None, field: str) -> Keys | None:
    """The keys in a file, one a line; empty lines and those that begin with # do not count. None without a file.

    Raises ConfigError if it cannot be read, has none, or has one that is too short.
    """
    if path is None:
        return None
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the keys in {path}: {exc}", field=field) from exc
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"there is no key in {path}", field=field, remedy="write one a line")
    if short := [place for place, key in enumerate(keys, 1) if len(key) < MIN_LENGTH]:
        raise ConfigError(
            f"key {short[0]} in {path} is too short",
            field=field,
            ours=f"fewer than {MIN_LENGTH} characters",
            theirs=f"at least {MIN_LENGTH}",
            remedy="write a longer one, for example: openssl rand -hex 32",
        )
    return Keys(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()

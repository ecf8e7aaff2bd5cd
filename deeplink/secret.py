"""The secret that engines and router share, and what is derived from it.

On one host nothing has to be set up: the first process makes a random secret in the user's state folder,
readable by that user alone. Across hosts, copy that file or name another with `secret_file` in deeplink.toml.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from deeplink.errors import ConfigError

MIN_BYTES = 16


def default_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "deeplink" / "secret"


def load(path: Path | None = None) -> bytes:
    """The secret in `path`, or the per-user one (made on first use, mode 0600)."""
    if path is None:
        path = default_path()
        try:
            _make(path)
        except OSError as exc:
            raise ConfigError(
                f"cannot make the secret file {path}: {exc.strerror}",
                field="secret_file",
                remedy="name a file you can read with secret_file in deeplink.toml",
            ) from exc
    try:
        secret = path.read_bytes().strip()
    except OSError as exc:
        raise ConfigError(f"cannot read the secret file {path}: {exc.strerror}", field="secret_file") from exc
    if len(secret) < MIN_BYTES:
        raise ConfigError(
            f"the secret in {path} is too short",
            field="secret_file",
            ours=f"{len(secret)} bytes",
            theirs=f"at least {MIN_BYTES}",
            remedy="write a longer one, for example: openssl rand -hex 32",
        )
    return secret


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose, so that what one endpoint sees is worth nothing at another."""
    return hmac.new(secret, b"deeplink/" + purpose.encode(), hashlib.sha256).digest()


def control_token(secret: bytes) -> str:
    """The bearer token of the control endpoint."""
    return derive(secret, "control").hex()


def _make(path: Path) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Written aside and linked into place: of two processes that start at once, one wins and both read it.
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()

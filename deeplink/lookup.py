"""An engine as an operator names it: by its name in deeplink.toml, by a URL, or by a file with its contract."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from deeplink import config as configs
from deeplink import secret as secrets
from deeplink.config import Config
from deeplink.errors import ConfigError, LocalError, ProtocolError
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.local import client

_URL = re.compile(r"(https?://[^/\s?#@]+)(/v1)?/?")


@dataclass(frozen=True, slots=True)
class Found:
    """`control` is the control endpoint that served the contract; empty where it came from a file."""

    contract: Contract
    control: str = ""


def find(engine: str, config: Config, api: bool = False) -> Found:
    """The contract of `engine`; with `api`, a URL is that of an OpenAI endpoint and not asked itself.

    Raises ConfigError for what names no engine, LocalError when it cannot be reached or does not answer with a
    contract, ProtocolError or Refused for a file that is none that this release can read.
    """
    controls = {entry.name: entry.control for entry in config.engines}
    if "://" in engine:
        return fetch(_controls(engine, api), config)
    if engine in controls:
        return fetch([controls[engine]], config)
    return Found(_open(engine, controls))


def fetch(controls: Iterable[str], config: Config) -> Found:
    """From the first of these control endpoints that has it."""
    token = secrets.control_token(secrets.load(config.secret_file))
    failed = []
    for control in controls:
        try:
            data = client.get(f"{control}/v1/contract", token, "application/msgpack", contracts.MAX_BYTES)
            return Found(contracts.decode(data), control)
        except LocalError as exc:
            failed.append(exc.message)
        except ProtocolError as exc:
            failed.append(f"{control}/v1/contract: {exc}")
    raise LocalError("; and ".join(failed))


def _controls(url: str, api: bool) -> list[str]:
    """Where the contract may be: at the URL, or at the control endpoint that goes with it as an OpenAI endpoint."""
    match = _URL.fullmatch(url)
    try:
        if match is None or urlsplit(match[1]).port == 0:  # raises ValueError itself for what is no port at all
            raise ValueError("write http://host:port")
    except ValueError as exc:
        raise ConfigError(f"not the URL of an engine: {exc}") from exc
    control = configs.control_url(match[1])
    return [control] if api or match[2] else [match[1], control]


def _open(name: str, engines: Iterable[str]) -> Contract:
    try:
        with open(name, "rb") as file:
            data = file.read(contracts.MAX_JSON_BYTES + 1)
    except FileNotFoundError as exc:
        known = ", ".join(engines) or "none"
        raise ConfigError(f"no URL, no file, and no engine in deeplink.toml (known: {known})") from exc
    except (OSError, ValueError) as exc:  # ValueError: what cannot be the name of a file
        raise ConfigError(f"cannot read the file: {exc}") from exc
    return contracts.from_json(data) if data.lstrip()[:1] == b"{" else contracts.decode(data)

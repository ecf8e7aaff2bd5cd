"""What the operator asked for, in whichever way: flags, a table in vLLM's `additional_config`, or the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deeplink import config
from deeplink.errors import ConfigError
from deeplink.kvconnector.registration import check_url, name_of

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
TABLE = "deeplink"
"""The key of `additional_config`."""

ROLE, PORT, ROUTER = "DEEPLINK_ROLE", "DEEPLINK_CONTROL_PORT", "DEEPLINK_ROUTER"
"""Beside `config.VARIABLE`."""
ANYWHERE = ("0.0.0.0", "::", "")
"""Addresses to listen on that are none to connect to."""


@dataclass(frozen=True, slots=True)
class Asked:
    """None is not said. `config` is the path of a deeplink.toml, `control_port` is 0 for any, `router` the URL of one
    to register with."""

    role: str | None = None
    config: str | None = None
    control_port: int | None = None
    router: str | None = None

    def over(self, other: Asked) -> Asked:
        """What this says, and what `other` says where this says nothing."""
        mine, others = (tuple(getattr(one, field.name) for field in fields(one)) for one in (self, other))
        return Asked(*(b if a is None else a for a, b in zip(mine, others, strict=True)))

    @property
    def said(self) -> list[str]:
        return [field.name.replace("_", "-") for field in fields(self) if getattr(self, field.name) is not None]


def by_flags(args: argparse.Namespace) -> Asked:
    return Asked(*(getattr(args, f"deeplink_{field.name}", None) for field in fields(Asked)))


def by_environment() -> Asked:
    """Raises ConfigError. The file is left to `config.load`, which knows its variable."""
    text = os.environ.get(PORT)
    return Asked(
        role=os.environ.get(ROLE) or None,
        control_port=None if text is None else config.parse_port(text, PORT),
        router=os.environ.get(ROUTER) or None,
    )


def by_table(additional: Mapping[str, Any]) -> Asked | None:
    """``{"deeplink": {"role": …, "config": …, "control_port": …, "router": …}}``; None without that key.

    Words may be joined by hyphens as in the flags. Raises ConfigError.
    """
    if TABLE not in additional:
        return None
    table = additional[TABLE]
    names = tuple(field.name for field in fields(Asked))
    if not isinstance(table, Mapping):
        raise _wrong("it is no table", table, ", ".join(names))
    given = {str(key).replace("-", "_"): value for key, value in table.items()}
    if unknown := sorted(given.keys() - set(names)):
        raise _wrong("there is no such setting", ", ".join(unknown), ", ".join(names))
    port = given.get("control_port")
    if port is not None:
        given["control_port"] = config.parse_port(str(port), f"additional-config.{TABLE}.control_port")
    for name in ("role", "router", "config"):
        if given.get(name) is not None and not isinstance(given[name], str | os.PathLike):
            raise _wrong(f"{name} is no text", given[name], "text")
    return Asked(**{name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in given.items()})


def without_table(additional: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in additional.items() if key != TABLE}


def transfer_config(asked: Asked, api: str | None = None) -> KVTransferConfig:
    """What ``--platform deeplink`` stands for. `api` is the URL of the engine's API, None where nothing serves one.

    Raises ConfigError.
    """
    from vllm.config import KVTransferConfig

    from vllm_deeplink import CONNECTOR

    role = asked.role or "both"
    if role not in ROLES:
        raise ConfigError(f"{role!r} is not a role", field="deeplink-role", ours=role, theirs=", ".join(ROLES))
    settings = config.load(asked.config)  # a mistake in the file is told here, not by a worker a minute later
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_role=ROLES[role],
        kv_load_failure_policy=settings.kv.on_failure,
        kv_connector_extra_config={
            "config": asked.config,
            "control_port": asked.control_port or 0,
            "registration": registration(asked, settings, api),
        },
    )


def registration(asked: Asked, settings: config.Config, api: str | None) -> dict[str, str] | None:
    """Where to register, and as what; None for nowhere. Raises ConfigError for what no router could use."""
    section = settings.registration
    if not (asked.router or section.router):
        return None
    router = check_url(asked.router or section.router)
    url = section.url or api
    if not url:
        raise ConfigError(
            "nothing is known of where this engine's API is, and a router is to be told",
            field="registration.url",
            remedy="serve the engine on a port, or set registration.url in deeplink.toml",
        )
    if not is_loopback(router):
        for field, address in (("kv.host", settings.kv.host), ("registration.url", url)):
            if is_loopback(address):
                raise ConfigError(
                    f"the router {router} is to reach this engine at {address}, which is that host itself",
                    field=field,
                    ours=address,
                    remedy=f"set {field} in deeplink.toml to an address of this host; for a router on this host, "
                    "name it as 127.0.0.1",
                )
    return {"router": router, "url": url, "name": section.name or name_of(url), "api": api or url}


def is_loopback(address: str) -> bool:
    """Of a host, or of a URL's. Names are not looked up, but for the one that always means it."""
    host = urlsplit(address).hostname if "://" in address else address
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def api_url(args: argparse.Namespace, file: str | None) -> str | None:
    """Where others reach the API of ``vllm serve``: the address it listens on, or else the one that peers use."""
    if getattr(args, "uds", None):
        return None
    host = getattr(args, "host", None) or ""
    if host in ANYWHERE:
        host = config.load(file).kv.host
    scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{api_port(args)}"


def api_port(args: argparse.Namespace) -> int:
    return getattr(args, "port", None) or 8000


def _wrong(what: str, ours: object, theirs: str) -> ConfigError:
    return ConfigError(f"additional-config.{TABLE}: {what}", field=TABLE, ours=repr(ours)[:200], theirs=theirs)

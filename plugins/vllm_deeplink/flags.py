"""The command-line flags, the same as environment variables, and what they turn into.

vLLM has no hook for flags, so `EngineArgs` is wrapped: one method adds the flags to the parser, another sees the parsed
values (from the command line or a ``--config`` file alike), and a third is the last before an engine is made, which
``LLM(...)`` goes through too. Tested with vLLM 0.32.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from deeplink import config
from deeplink.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


PLATFORM, ROLE, PORT = "DEEPLINK_PLATFORM", "DEEPLINK_ROLE", "DEEPLINK_CONTROL_PORT"
"""Beside `config.VARIABLE`. What the command line says comes first."""


def install() -> None:
    """Wrap `EngineArgs` once per process."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs, "_deeplink", False):
        return
    add_cli_args, from_cli_args = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__
    create_engine_config = EngineArgs.create_engine_config

    def with_flags(parser: Any) -> Any:
        return _add(add_cli_args(parser))

    def with_values(cls: type, args: argparse.Namespace) -> Any:
        _apply(args)
        return from_cli_args(cls, args)

    def with_environment(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.kv_transfer_config is None and os.environ.get(PLATFORM) == "deeplink":
            self.kv_transfer_config = transfer_config()
        return create_engine_config(self, *arguments, **options)

    EngineArgs.add_cli_args = staticmethod(with_flags)
    EngineArgs.from_cli_args = classmethod(with_values)
    EngineArgs.create_engine_config = with_environment
    EngineArgs._deeplink = True


def transfer_config(role: str | None = None, file: str | None = None, port: int | None = None) -> KVTransferConfig:
    """What ``--platform deeplink`` stands for; each value from the environment, or its default, when it is None.

    `port` is that of the control endpoint; by default any, which the log names. Raises ConfigError.
    """
    from vllm.config import KVTransferConfig

    from vllm_deeplink import CONNECTOR

    role = role or os.environ.get(ROLE) or "both"
    if role not in ROLES:
        raise ConfigError(f"{role!r} is not a role", field="deeplink-role", ours=role, theirs=", ".join(ROLES))
    settings = config.load(file)  # a mistake in the file is told here, at once, and not by a worker a minute later
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_role=ROLES[role],
        kv_load_failure_policy=settings.kv.on_failure,
        kv_connector_extra_config={"config": file, "control_port": _environment_port() if port is None else port},
    )


def _environment_port() -> int:
    text = os.environ.get(PORT, "0")
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"{PORT} is not a port", field=PORT, ours=text)
    return int(text)


def _add(parser: Any) -> Any:
    group = parser.add_argument_group("deeplink", "Hand the KV cache to, or take it from, an unlike engine.")
    group.add_argument(
        "--platform",
        choices=["auto", "deeplink"],
        default=None,
        help="deeplink: run on the platform vLLM finds, with deeplink's KV connector.",
    )
    group.add_argument(
        "--deeplink-role", choices=sorted(ROLES), default=None, help="What this engine does. Default: both."
    )
    group.add_argument(
        "--deeplink-config", default=None, metavar="FILE", help="deeplink.toml; default: $DEEPLINK_CONFIG."
    )
    group.add_argument(
        "--deeplink-control-port",
        type=int,
        default=None,
        metavar="PORT",
        help=f"Port of the control endpoint. Default: the API port + {config.CONTROL_OFFSET}.",
    )
    return parser


def _apply(args: argparse.Namespace) -> None:
    role, file = getattr(args, "deeplink_role", None), getattr(args, "deeplink_config", None)
    port = getattr(args, "deeplink_control_port", None)
    platform = getattr(args, "platform", None) or os.environ.get(PLATFORM)
    if platform != "deeplink":
        given = [f"--deeplink-{name}" for name, v in (("role", role), ("config", file), ("control-port", port)) if v]
        if given:
            raise ConfigError(f"{', '.join(given)} without --platform deeplink", remedy="add --platform deeplink")
        return
    if getattr(args, "kv_transfer_config", None) is not None:
        raise ConfigError(
            "--platform deeplink brings its own KV connector; --kv-transfer-config names another",
            field="kv-transfer-config",
            remedy="leave one of the two out",
        )
    if port is None and PORT not in os.environ:
        port = config.control_port(getattr(args, "port", None) or 8000)
    args.kv_transfer_config = transfer_config(role, file, port)

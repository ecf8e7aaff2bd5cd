"""The command-line flags, and what they turn into.

vLLM has no hook for flags, so its two class methods are wrapped: one adds the flags to the parser, the other sees the
parsed values (from the command line or a ``--config`` file alike) and fills in the KV-transfer config.
Tested with vLLM 0.32.
"""

from __future__ import annotations

import argparse
from typing import Any

from deeplink import config
from deeplink.errors import ConfigError

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def install() -> None:
    """Wrap `EngineArgs` once per process."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs, "_deeplink", False):
        return
    add_cli_args, from_cli_args = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__

    def with_flags(parser: Any) -> Any:
        return _add(add_cli_args(parser))

    def with_values(cls: type, args: argparse.Namespace) -> Any:
        _apply(args)
        return from_cli_args(cls, args)

    EngineArgs.add_cli_args = staticmethod(with_flags)
    EngineArgs.from_cli_args = classmethod(with_values)
    EngineArgs._deeplink = True


def _add(parser: Any) -> Any:
    group = parser.add_argument_group("deeplink", "Hand the KV cache to, or take it from, an unlike engine.")
    group.add_argument(
        "--platform",
        choices=["auto", "deeplink"],
        default="auto",
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
    if getattr(args, "platform", "auto") != "deeplink":
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
    from vllm.config import KVTransferConfig

    from vllm_deeplink import CONNECTOR

    config.load(file)  # a mistake in the file is told here, at once, and not by a worker a minute later
    api_port = getattr(args, "port", None) or 8000
    args.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_role=ROLES[role or "both"],
        kv_connector_extra_config={
            "config": file,
            "control_port": config.control_port(api_port) if port is None else port,
        },
    )

"""The ways to ask for deeplink, put into vLLM's.

vLLM has no hook for flags, so `EngineArgs` is wrapped: one method adds the flags to the parser, another sees the parsed
values (from the command line or a ``--config`` file alike), and a third is the last before an engine is made, which
``LLM(...)`` goes through too. Tested with vLLM 0.32.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from deeplink import config, secret
from deeplink.errors import ConfigError
from deeplink.kvconnector.registration import Presence, leave_at_exit
from vllm_deeplink import beside, platform
from vllm_deeplink.asked import (
    ROLES,
    Asked,
    api_port,
    api_url,
    by_environment,
    by_flags,
    by_table,
    transfer_config,
    without_table,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


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

    def with_table_or_environment(self: Any, *arguments: Any, **options: Any) -> Any:
        _complete(self)
        made = create_engine_config(self, *arguments, **options)
        if (extra := beside.settings(made.kv_transfer_config)) is not None:
            from vllm.platforms import current_platform  # not every process comes here

            from vllm_deeplink import supported, versions

            replicas = made.parallel_config.data_parallel_size
            supported.check_parallel(made, versions.current(), cpu=current_platform.is_cpu())
            _check_ports(int(extra.get("control_port", 0)), replicas)
            extra["replicas"] = replicas
            if made.parallel_config.node_rank:
                extra["registration"] = None  # the engine's first host speaks for all of it
        _leave_at_exit(made.kv_transfer_config)
        return made

    EngineArgs.add_cli_args = staticmethod(with_flags)
    EngineArgs.from_cli_args = classmethod(with_values)
    EngineArgs.create_engine_config = with_table_or_environment
    EngineArgs._deeplink = True


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
        "--deeplink-router", default=None, metavar="URL", help="Register with this router, and go on doing so."
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
    """The command line, or the file it names."""
    flags, table = by_flags(args), by_table(getattr(args, "additional_config", None) or {})
    wanted = getattr(args, "platform", None) or os.environ.get(platform.VARIABLE)
    if wanted != platform.NAME and table is None:
        if said := flags.said:
            flagged = ", ".join(f"--deeplink-{name}" for name in said)
            raise ConfigError(f"{flagged} without --platform deeplink", remedy="add --platform deeplink")
        return
    asked = flags.over(table or Asked()).over(by_environment())
    if asked.control_port is None:
        asked = Asked(control_port=config.control_port(api_port(args))).over(asked)
    ours = transfer_config(asked, api_url(args, asked.config))
    other = getattr(args, "kv_transfer_config", None)
    args.kv_transfer_config = ours if other is None else beside.both(ours, other)
    if table is not None:
        args.additional_config = without_table(args.additional_config)
    platform.attach()


def _complete(arguments: Any) -> None:
    """What was made without a command line, as ``LLM(...)`` makes it. After one, there is nothing left to do."""
    additional = arguments.additional_config if isinstance(arguments.additional_config, dict) else {}
    table = by_table(additional)
    if table is None and os.environ.get(platform.VARIABLE) != platform.NAME:
        return
    given = arguments.kv_transfer_config
    if table is None and beside.settings(given) is not None:
        return
    ours = transfer_config((table or Asked()).over(by_environment()))
    arguments.kv_transfer_config = ours if given is None else beside.both(ours, given)
    arguments.additional_config = without_table(additional)
    platform.attach()


def _check_ports(first: int, replicas: int) -> None:
    """Before a replica finds out a minute later. Raises ConfigError."""
    try:
        config.replica_port(first, replicas - 1)
    except ValueError as exc:
        raise ConfigError(
            str(exc), field="deeplink-control-port", ours=str(first), remedy="choose a lower port"
        ) from exc


def _leave_at_exit(transfer: KVTransferConfig | None) -> None:
    """This process starts the engine's others, and outlives them."""
    extra = beside.settings(transfer)
    if transfer is None or extra is None:
        return
    where = extra.get("registration")
    if where is not None:
        settings = config.load(extra.get("config"))
        known, replicas = secret.load(settings.secret_file), extra["replicas"]
        for rank in range(replicas):
            # vLLM gives the replicas these ids.
            epoch, number = (f"{transfer.engine_id}_dp{rank}", rank) if replicas > 1 else (transfer.engine_id, None)
            presence = Presence(where["name"], where["url"], "", epoch, rank=number)
            leave_at_exit(where["router"], presence, known)

"""`deeplink …`: each command is a module of this package, imported only when it is called."""

from __future__ import annotations

from importlib import import_module

import click

from deeplink import __version__

COMMANDS = {
    "bench": "how fast this machine hands over KV caches, beside what it could do",
    "chips": "which chips are here, and which engine plugin serves them",
    "conform": "whether a vendor's fused operators mean what they should",
    "contract": "what an engine states, and whether two engines can hand over",
    "demo": "two unlike engines and a router on this machine, from nothing",
    "doctor": "what is here, what works, and what would be refused and why",
    "emit": "what starts a placement: commands, manifests, the router's weights",
    "measure": "what a running engine does, as a table of rates for the solver",
    "replan": "the least that has to change in a running placement",
    "router": "serve one OpenAI endpoint in front of the engines in deeplink.toml",
    "serve": "an engine that has no plugin interface, with deeplink in it",
    "simulate": "what the placement of a fleet does with a trace, event by event",
    "solve": "which chips should do what: the best placement, proven",
    "up": "start a placement's engines and the router on this machine",
}

# Commands that live with their plugin: the command line alone knows where, and no part imports another for it.
_OF_PLUGINS = {"conform": "lmdeploy_deeplink.conformance.command", "serve": "lmdeploy_deeplink.engine.command"}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(_OF_PLUGINS.get(cmd_name, f"deeplink.cli.{cmd_name}")).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=_Lazy)
@click.version_option(__version__, prog_name="deeplink")
def main() -> None:
    """One LLM request across unlike accelerators."""

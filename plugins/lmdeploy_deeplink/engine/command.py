"""`deeplink serve lmdeploy`: LMDeploy's own server, on this host's device."""

from __future__ import annotations

import os
import sys

import click

from deeplink.errors import DeeplinkError
from lmdeploy_deeplink.engine import platform, versions

PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}


@click.group("serve", short_help="An engine that has no plugin interface, with deeplink in it.")
def command() -> None:
    """Start an engine that has no plugin interface of its own, with deeplink in it."""


@command.command("lmdeploy", context_settings=PASSED_ON, short_help="LMDeploy's api_server on this host's device.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def lmdeploy(words: tuple[str, ...]) -> None:
    """`lmdeploy serve api_server` with all of its options, and ``--backend deeplink`` where no backend is named.

    WORDS are the model and LMDeploy's options, as LMDeploy takes them.
    """
    try:
        versions.hooks()
        device = platform.resolve()
    except DeeplinkError as exc:
        raise click.ClickException(str(exc)) from exc
    chosen = any(word == "--backend" or word.startswith("--backend=") for word in words)
    added = [] if chosen else ["--backend", "deeplink"]
    click.echo(f"LMDeploy on {device}", err=True)
    argv = [sys.executable, "-m", "lmdeploy_deeplink.engine.launch", "serve", "api_server", *words, *added]
    sys.stderr.flush()
    os.execv(sys.executable, argv)

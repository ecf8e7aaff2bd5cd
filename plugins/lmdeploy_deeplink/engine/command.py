"""`deeplink serve lmdeploy`: LMDeploy's own server, on this host's device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import click

from deeplink.errors import DeeplinkError
from lmdeploy_deeplink.engine import platform, versions, waiting, workers

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
    # For all processes of the engine; see there.
    os.environ[waiting.VARIABLE] = device
    chosen = any(word == "--backend" or word.startswith("--backend=") for word in words)
    added = [] if chosen else ["--backend", "deeplink"]
    click.echo(f"LMDeploy on {device}", err=True)
    argv = [sys.executable, "-m", "lmdeploy_deeplink.engine.launch", "serve", "api_server", *words, *added]
    sys.stderr.flush()
    os.execv(sys.executable, argv)


@command.group("workers", short_help="Whether Ray's workers of this Python know deeplink.")
def of_ray() -> None:
    """Processes that Ray starts for an engine learn of deeplink by a file among the packages of their Python.

    It does nothing in processes that `deeplink serve lmdeploy` has not caused. Run this with the engine's Python, on
    every node.
    """


@of_ray.command("enable", short_help="Write the file.")
def enable() -> None:
    """Write the file, where it is not there."""
    _of_file(workers.enable)
    click.echo(f"{workers.place()} is there")


@of_ray.command("disable", short_help="Remove the file.")
def disable() -> None:
    """Remove the file, where it is there and deeplink's."""
    _of_file(workers.disable)
    click.echo(f"{workers.place()} is not there")


def _of_file(change: Callable[[], None]) -> None:
    try:
        change()
    except DeeplinkError as exc:
        raise click.ClickException(str(exc)) from exc

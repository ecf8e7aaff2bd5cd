"""`deeplink router`: serve one OpenAI endpoint in front of the engines in deeplink.toml."""

from __future__ import annotations

import os
from pathlib import Path

import click

from deeplink import config as configs
from deeplink import secret as secrets
from deeplink.errors import ConfigError, PluginError
from deeplink.router import logs, owner, serve


@click.command("router")
@click.option(
    "--config",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"deeplink.toml; default: the file {configs.VARIABLE} names",
)
@click.option("--host", help="address to listen on, instead of the file's")
@click.option("--port", type=click.IntRange(0, 65535), help="port to listen on, instead of the file's")
@click.option("--workers", type=click.IntRange(1, 256), help="processes that serve, instead of the file's")
def command(path: Path | None, host: str | None, port: int | None, workers: int | None) -> None:
    """Serve one OpenAI endpoint in front of the engines in deeplink.toml."""
    logs.to_stderr()
    try:
        config = configs.load(path)
        secret = secrets.load(config.secret_file)
    except ConfigError as exc:
        raise click.ClickException(str(exc)) from exc
    if not config.engines and config.router.admin_keys_file is None:  # else they may come later
        raise click.ClickException("no engine is configured; list them in deeplink.toml under [[engines]]")
    over = {name: value for name, value in (("host", host), ("port", port), ("workers", workers)) if value is not None}
    config = config.model_copy(update={"router": config.router.model_copy(update=over)})
    try:
        if config.router.workers > 1:
            owner.run(config, secret, _file(path), config.router.workers)
        else:
            serve.run(config, secret, _file(path))
    except (ConfigError, PluginError) as exc:
        raise click.ClickException(str(exc)) from exc
    except OSError as exc:
        raise click.ClickException(
            f"cannot listen on {config.router.host}:{config.router.port}: {exc.strerror or exc}"
        ) from exc


def _file(path: Path | None) -> Path | None:
    """The file whose engines are followed: the same that was read."""
    named = path or os.environ.get(configs.VARIABLE)
    return Path(named) if named else None

"""`deeplink emit`: what starts a placement.

Exit codes, for scripts: 0 written, 2 the placement is wrong or has nothing to start.
"""

from __future__ import annotations

from pathlib import Path

import click

from deeplink.errors import DeeplinkError

WRONG = 2


class _Wrong(click.ClickException):
    exit_code = WRONG


@click.command("emit", short_help="What starts a placement: commands, manifests, the router's weights.")
@click.argument("placement", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["local", "compose", "k8s", "ray"]),
    default="local",
    show_default=True,
    help="A shell script, a Compose file, Kubernetes manifests, or a start on a Ray cluster.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("placement"),
    show_default=True,
    help="Where to write to.",
)
def command(placement: Path, format_: str, folder: Path) -> None:
    """Write what starts PLACEMENT, a file that `deeplink solve --out` wrote: JSON, or TOML if it is called so."""
    from deeplink.cli.solve import write
    from deeplink.solver import emit
    from deeplink.solver import placement as doc

    try:
        files = emit.files(doc.load(placement), format_)
        write(folder, files)
    except DeeplinkError as exc:
        raise _Wrong(str(exc)) from exc
    except OSError as exc:
        raise _Wrong(f"cannot write {exc.filename}: {exc.strerror}") from exc
    for name in files:
        click.echo(folder / name)

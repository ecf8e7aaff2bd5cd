"""`deeplink up`: a placement on this machine, until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich.console import Console

from deeplink.cli import terminal
from deeplink.errors import DeeplinkError, LocalError

if TYPE_CHECKING:
    from deeplink.local.trial import Checked

DEFAULT_PORT = 8000


@click.command("up", short_help="Start a placement's engines and the router on this machine.")
@click.argument("placement", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--port", type=click.IntRange(1, 65535), help=f"The router's.  [default: {DEFAULT_PORT}; any with --once]"
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A Hugging Face model folder, instead of the placement's checkpoint.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep configuration and logs here.  [default: a temporary one]",
)
@click.option("--once", is_flag=True, help="Send a request of each length, check which way it went, and end.")
@click.option(
    "--most", type=click.IntRange(min=1), default=512, show_default=True, help="With --once: longest prompt, in tokens."
)
@click.option("--json", "as_json", is_flag=True, help="With --once: the last line of stdout is one JSON object.")
def command(
    placement: Path,
    port: int | None,
    model: Path | None,
    folder: Path | None,
    once: bool,
    most: int,
    as_json: bool,
) -> None:
    """Start the engines of PLACEMENT, a file that `deeplink solve --out` wrote, and the router in front of them.

    Engines on processors run in environments that are made on the first run (minutes); those on other chips run the
    engine that is installed here. All end with Ctrl-C, or when one of them ends.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    from deeplink.local import up
    from deeplink.solver import placement as doc

    signal.signal(signal.SIGTERM, _end)
    console = terminal.console(stderr=True)
    try:
        options = up.Options(port or (0 if once else DEFAULT_PORT), model, folder)
        with up.running(doc.load(placement), options, lambda line: console.print(f"[dim]{line}[/]")) as running:
            if once:
                checked = up.check(running, most)
                _show(checked, console if as_json else terminal.console())
                if as_json:
                    print(up.as_json(running, checked), flush=True)
                if failed := [one for one in checked if one.failed]:
                    raise LocalError("not as planned:\n" + "\n".join(f"  {one.bucket}: {one.failed}" for one in failed))
                return
            out = terminal.console()
            for name, url in running.urls.items():
                out.print(f"{name}: {url}", markup=False, soft_wrap=True)
            out.print(f"router: {running.router_url} (until Ctrl-C)", markup=False)
            while True:
                time.sleep(1)
                running.require_alive()
    except KeyboardInterrupt:
        console.print("ended")
    except (DeeplinkError, OSError) as exc:
        code = exc.code if isinstance(exc, DeeplinkError) else "failed"
        console.print(f"[bold red]{code}[/]", end=": ")
        console.print(terminal.printable(str(exc)), markup=False, soft_wrap=True)
        sys.exit(1)


def _show(checked: list[Checked], console: Console) -> None:
    table = terminal.table("requests", "bucket", "tokens", "path", "prefill", "decode", "TTFT ms", "")
    for one in checked:
        cells = (
            one.bucket,
            str(one.prompt),
            one.path,
            one.prefill,
            one.decode,
            f"{one.ttft_ms:.0f}",
            one.failed or "ok",
        )
        table.add_row(*(terminal.cell(cell) for cell in cells))
    console.print(table)


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like an exit, so that the engines are ended too."""
    sys.exit(128 + number)

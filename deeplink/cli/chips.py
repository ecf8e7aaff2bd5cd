"""`deeplink chips`: which chips are here, how that is known, and which engine plugin serves them."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deeplink.chips import detect, report
from deeplink.plugins import load_plugins

_STYLES = {"works": "green", "off": "dim", "warning": "bold yellow"}


@click.command("chips", short_help="Which chips are here, and who serves them.")
@click.option(
    "--wait",
    type=click.FloatRange(0, 60),
    default=2.0,
    show_default=True,
    help="Seconds that the vendors' own tools may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(wait: float, as_json: bool) -> None:
    """Which chips are here, how that is known, and which engine plugin serves them.

    Reads the device tree, and asks a vendor's own tool where that shows its devices. Starts no device.
    """
    profiles = load_plugins().chips.items.values()
    found = detect.detect(profiles, seconds=wait)
    lines = report.lines(found, profiles)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"chips": lines, "detected": found}), indent=2))
        return
    console = Console(highlight=False)
    table = Table("chip", "", "what is here")
    for line in lines:
        table.add_row(Text(line.name), Text(line.standing, _STYLES[line.standing]), Text(line.text))
        for why in line.facts.get("reasons", []):
            table.add_row("", "", Text(f"- {why}", "dim"))
    (console if console.is_terminal else Console(highlight=False, width=110)).print(table)

"""`deeplink conform`: whether the fused operators of the vendors here mean what they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click
import msgspec
from rich.text import Text

from deeplink.cli import terminal
from deeplink.errors import PluginError
from deeplink.plugins import load_plugins
from lmdeploy_deeplink.conformance import report
from lmdeploy_deeplink.conformance.report import Findings
from lmdeploy_deeplink.conformance.rows import FAILED, rows, untested
from lmdeploy_deeplink.operators.vendor import NAMES

if TYPE_CHECKING:
    from lmdeploy_deeplink.operators.vendor import Vendor

_STYLES = {"passed": "green", "failed": "bold red", "unsupported": "yellow"}


@click.command("conform", short_help="Whether a vendor's fused operators mean what they should.")
@click.option("--vendor", "names", multiple=True, help="Only this one; may be given several times.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(names: tuple[str, ...], as_json: bool) -> None:
    """Call every fused operator of the vendors here, and compare each result with one in float64.

    Needs torch: run it with the Python of the engine, `python -m deeplink.cli conform`.
    """
    registered = load_plugins().operators
    try:
        loaders = {name: registered.get(name) for name in names or sorted(registered.items)}
    except PluginError as exc:
        raise click.BadParameter(str(exc), param_hint="--vendor") from exc
    found = report.report(_tested(name, load) for name, load in loaders.items())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        _print(found.vendors)
    ran = [one for one in found.vendors if one.ran]
    if not ran or any(row.result == FAILED for one in ran for row in one.rows):
        raise click.exceptions.Exit(1)


def _tested(name: str, load: Callable[[], Vendor]) -> Findings:
    try:
        vendor = load()
    except PluginError as exc:
        return Findings(name, untested(name, NAMES, str(exc)))
    from lmdeploy_deeplink.conformance.run import run
    from lmdeploy_deeplink.conformance.suite import cases

    return Findings(name, rows(name, run(vendor, cases())), vendor.version, vendor.device)


def _print(vendors: list[Findings]) -> None:
    console = terminal.console()
    for one in vendors:
        if not one.ran:
            console.print(Text(f"{one.vendor}: untested; {'; '.join(report.reasons(one))}", "dim"))
            continue
        head, lines = report.table(one)
        made = terminal.table(f"{one.vendor}, {one.version}, on {one.device}", *head)
        for operator, *cells in lines:
            made.add_row(operator, *(Text(cell, _STYLES.get(cell.split()[0], "")) for cell in cells))
        console.print(made)
        for why in report.reasons(one):
            console.print(terminal.cell(f"- {why}"))

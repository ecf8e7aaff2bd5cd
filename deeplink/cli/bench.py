"""`deeplink bench`: what this machine does, each figure beside its mark from the same run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deeplink.bench import families, run, saving
from deeplink.bench.scale import QUICK, Scale


@click.group("bench")
def command() -> None:
    """Measure this machine, each figure beside its mark from the same run."""


@command.command("kv", short_help="How fast KV caches are handed over, converted and verified.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the result to this file as JSON, and beside it a plot.",
)
@click.option("--rows", default="", help="Only these, with commas between them; relayout_* is all that begin so.")
@click.option("--quick", is_flag=True, help="Once and on small caches: whether it runs, not how fast.")
def kv(as_json: bool, save: Path | None, rows: str, quick: bool) -> None:
    """How fast KV caches are handed over, converted and verified here (minutes; with --quick under one).

    Emulated links need root, other rows a library or the engine environment that `deeplink demo` makes. A row that
    cannot be measured is listed as skipped, with the reason.
    """
    try:
        wanted = families.chosen([name.strip() for name in rows.split(",") if name.strip()])
    except ValueError as exc:
        raise click.BadParameter(str(exc), param_hint="--rows") from exc
    result = run.kv(wanted, QUICK if quick else Scale(), lambda line: click.echo(line, err=True))
    if save is not None:
        for line in saving.save(result, save):
            click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        console = Console(highlight=False)
        (console if console.is_terminal else Console(highlight=False, width=140)).print(_table(result))
    if not result["rows"]:
        sys.exit(1)


def _table(result: dict[str, Any]) -> Table:
    table = Table("row", "value", "mark", "ratio", "goal", "", "CPU s/GB")
    for row in result["rows"]:
        met = {True: "[green]met[/]", False: "[bold red]not met[/]", None: ""}[row["met"]]
        cost = row.get("cpu_s_per_gb")
        table.add_row(
            row["name"],
            f"{row['value']:.4g} {row['unit']}",
            f"{row['mark']:.4g} ({row['mark_name']})",
            f"{row['ratio']:.2f}",
            row["goal"],
            met,
            "" if cost is None else f"{cost:.2f}",
        )
    for row in result["skipped"]:
        # As text: square brackets in it are no markup.
        table.add_row(row["name"], "skipped", Text(row["reason"]), "", "", "", "")
    return table

"""`deeplink solve`: which chips should do what.

Exit codes, for scripts: 0 a placement was found, 1 there is none, 2 the fleet file is wrong or time was up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.errors import DeeplinkError

if TYPE_CHECKING:
    from deeplink.solver.placement import Point

NONE = 1
WRONG = 2


class _Wrong(click.ClickException):
    exit_code = WRONG


@click.command("solve", short_help="Which chips should do what: the best placement, proven.")
@click.argument("fleet", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the placement document instead of a report.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the placement document to this file, as TOML if it is called so.",
)
@click.option("--emit", type=click.Choice(["local", "compose", "k8s", "ray"]), help="Also write what starts it.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("placement"),
    show_default=True,
    help="Where --emit writes to.",
)
@click.option(
    "--plots", type=click.Path(file_okay=False, path_type=Path), help="Also write pictures (SVG) into this folder."
)
@click.option(
    "--pareto",
    type=click.IntRange(1, 100),
    help="Instead: the cheapest placements for so many rates up to the most that can be served.",
)
@click.option("--schema", is_flag=True, help="Print the placement document's JSON schema and nothing else.")
def command(
    fleet: Path | None,
    as_json: bool,
    out: Path | None,
    emit: str | None,
    folder: Path,
    plots: Path | None,
    pareto: int | None,
    schema: bool,
) -> None:
    """The best placement for the fleet, workload and service levels in FLEET, a TOML file.

    Exits with 0 when there is one, 1 when there is none (it says what would be enough), 2 when the file is wrong.
    """
    from deeplink.solver import placement as doc

    if schema:
        click.echo(json.dumps(doc.schema(), indent=2))
        return
    if fleet is None:
        raise click.UsageError("name a fleet file")
    from deeplink.solver import emit as emitted
    from deeplink.solver import plots as pictures
    from deeplink.solver.fleets import fleetfile
    from deeplink.solver.place import fronts, place

    try:
        if pareto:
            points = fronts(fleetfile.load(fleet), pareto)
            if plots is not None and points:
                pictures.front(points, plots / "front.svg")
            _front(points, as_json)
            return
        found = place(fleetfile.load(fleet))
        if plots is not None:
            pictures.draw(found, plots)
        files = emitted.files(found, emit) if emit and found.engines else {}
    except DeeplinkError as exc:
        raise _Wrong(str(exc)) from exc
    except OSError as exc:
        raise _Wrong(f"cannot write {exc.filename}: {exc.strerror}") from exc
    try:
        write(folder, files)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(doc.encode_toml(found) if out.suffix == ".toml" else doc.encode(found))
    except DeeplinkError as exc:
        raise _Wrong(str(exc)) from exc
    except OSError as exc:
        raise _Wrong(f"cannot write {exc.filename}: {exc.strerror}") from exc
    if as_json:
        click.echo(doc.encode(found).decode(), nl=False)
    else:
        from rich.console import Console

        from deeplink.solver import report

        report.show(found, Console())
    if found.status == "infeasible":
        sys.exit(NONE)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Files by name; a shell script is made executable."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o755)


def _front(points: tuple[Point, ...], as_json: bool) -> None:
    import msgspec
    from rich.console import Console

    from deeplink.solver import report

    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(points), indent=2))
    else:
        Console().print(report.front(points))
    if not points:
        sys.exit(NONE)

"""`deeplink replan`: the least that has to change in a running placement.

Exit codes, for scripts: 0 something is enough (or nothing has to change), 1 nothing is, 2 a file is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from deeplink.errors import DeeplinkError

IMPOSSIBLE = 1
WRONG = 2


class _Wrong(click.ClickException):
    exit_code = WRONG


@click.command("replan", short_help="The least that has to change in a running placement.")
@click.argument("fleet", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("placement", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("observed", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(fleet: Path, placement: Path, observed: Path, as_json: bool) -> None:
    """What has to change in PLACEMENT, which was solved from FLEET, for what OBSERVED says is going on.

    OBSERVED is JSON: {"rates": {BUCKET: requests a second}, "ttft_p99": s, "tpot_p99": s, "lost": {POOL: chips}}, of
    which only rates has to be there.
    """
    import msgspec

    from deeplink.solver import placement as doc
    from deeplink.solver.fleets import fleetfile
    from deeplink.solver.replan import Observed, replan

    try:
        seen = msgspec.json.decode(observed.read_bytes(), type=Observed)
        found = replan(fleetfile.load(fleet), doc.load(placement), seen)
    except OSError as exc:
        raise _Wrong(f"cannot read {exc.filename}: {exc.strerror}") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise _Wrong(f"{observed}: {exc}") from exc
    except DeeplinkError as exc:
        raise _Wrong(str(exc)) from exc
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        click.echo(f"change: {found.step}")
        for reason in found.why:
            click.echo(f"because {reason}")
        if found.step not in ("nothing", "impossible"):
            for name, count in found.engines.items():
                click.echo(f"{count} x {name}")
            click.echo(f"{found.moved} of them are to be started" if found.moved else "none of them has to be started")
            for route in found.routes:
                click.echo(f"{route.bucket}: {route.weight:.4g} from {route.prefill} to {route.decode}")
        if found.step == "impossible":
            click.echo("nothing that is left serves it: deeplink solve says what would, from a fleet file with it")
    if found.step == "impossible":
        sys.exit(IMPOSSIBLE)

"""`deeplink simulate`: what a placement does with a trace, event by event."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from deeplink.errors import DeeplinkError

LATE = 1
WRONG = 2


class _Wrong(click.ClickException):
    exit_code = WRONG


@click.command("simulate", short_help="What the placement of a fleet does with a trace, event by event.")
@click.argument("fleet", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="Azure's or Mooncake's; default: the fleet's."
)
@click.option(
    "--requests",
    type=click.IntRange(2, 10_000_000),
    default=20_000,
    show_default=True,
    help="How many, without a trace.",
)
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Times the rate."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of what is random.")
@click.option(
    "--policy",
    type=click.Choice(["least", "shared"]),
    default="least",
    show_default=True,
    help="Which engine of a group: the one with the fewest open requests, or the first that is free.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(fleet: Path, trace: Path | None, requests: int, rate: float, seed: int, policy: str, as_json: bool) -> None:
    """Solve FLEET, and run requests through the placement.

    Exits with 0 when the service levels are kept, 1 when not (or nothing can be placed), 2 when a file is wrong.
    """
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from deeplink.solver import verify
    from deeplink.solver.exact.solve import solve
    from deeplink.solver.fleets import fleetfile, traffic
    from deeplink.solver.fleets.candidates import formulate

    try:
        described = fleetfile.load(fleet)
        formulation = formulate(described)
        solution = solve(formulation.problem, described.objective, described.effort)
        if solution.status == "infeasible":
            raise click.ClickException("there is no placement to simulate; deeplink solve says what would be enough")
        run = traffic.requests(described, trace, requests, rate, seed)
        result = verify.run(formulation, solution, run, policy=policy, seed=seed)  # type: ignore[arg-type]
    except DeeplinkError as exc:
        raise _Wrong(str(exc)) from exc
    found = verify.judge(formulation, result)
    busy = {name: round(value, 6) for name, value in zip(verify.busy(formulation, solution), result.busy, strict=True)}
    if as_json:
        value = {**asdict(found), "busy": busy, "seconds": result.ended, "events": result.events}
        click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
    else:
        table = Table(title=f"{found.requests} requests in {result.ended:,.0f} s: {found.attained:.2%} in time")
        for column in ("", "p50", "p99", "wanted"):
            table.add_column(column)
        service = described.service
        table.add_row("time to first token, s", f"{found.ttft_p50:.3f}", f"{found.ttft_p99:.3f}", f"{service.ttft:g}")
        table.add_row("each further token, s", f"{found.tpot_p50:.4f}", f"{found.tpot_p99:.4f}", f"{service.tpot:g}")
        console = Console()
        console.print(table)
        for name, part in busy.items():
            console.print(f"{name}: busy {part:.0%} of the time")
    if found.attained < described.service.percentile:
        sys.exit(LATE)

"""A placement for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from deeplink.solver.kinds import DEFAULT, TITLES
from deeplink.solver.placement import Placement, Point, Predicted, Range, Simulated


def render(placement: Placement) -> Group:
    return Group(*_parts(placement))


def show(placement: Placement, console: Console) -> None:
    console.print(render(placement))


def front(points: tuple[Point, ...]) -> Table:
    table = _table("what more of the rate costs", "requests/s", "an hour", "for a million", "proven to", "engines")
    for point in points:
        million = point.cost / (point.rate * 3600) * 1e6
        engines = ", ".join(f"{count} x {name}" for name, count in point.engines.items())
        table.add_row(f"{point.rate:.4g}", f"{point.cost:.4g}", f"{million:.4g}", f"{point.gap:.2%}", engines)
    return table


def _parts(placement: Placement) -> Iterator[RenderableType]:
    yield _head(placement)
    if placement.status == "infeasible":
        yield _relaxations(placement)
    else:
        yield _engines(placement)
        yield _routes(placement)
        if placement.predicted is not None:
            yield _predicted(placement.predicted)
        if placement.simulated is not None:
            yield _simulated(placement.simulated)
        yield from _notes(placement)
        yield from _sensitivity(placement)
    for refused in placement.refused:
        yield Text(f"no handoff from {refused.prefill} to {refused.decode}: {refused.why}", "dim")
    for skipped in placement.skipped:
        yield Text(skipped, "dim")


def _head(placement: Placement) -> Text:
    if placement.status == "infeasible":
        return Text(
            f"{placement.name}: nothing serves {placement.rate:g} requests/s of {placement.model} in time", "bold red"
        )
    proof = "optimal" if placement.gap <= 1e-4 else f"at most {placement.gap:.2%} from the optimum"
    if placement.status == "model_too_uncertain":
        proof += " if the times are as predicted, but they are too uncertain to say so"
    return Text(
        f"{placement.name}: {placement.model}, {placement.objective} {placement.value:g} {placement.unit}, {proof}",
        "bold",
    )


def _relaxations(placement: Placement) -> Table:
    table = _table("what would be enough, each alone", "what", "needed")
    for one in placement.relaxations:
        table.add_row(one.what, one.text)
    if not placement.relaxations:
        table.add_row("-", "nothing of rate, chips, time, links or budget alone")
    return table


def _engines(placement: Placement) -> Table:
    # Where all are vLLM nobody needs to be told.
    unlike = any(engine.kind != DEFAULT for engine in placement.engines)
    table = _table(
        "engines", "engine", "chip", *(["of"] if unlike else []), "role", "count", "tp", "sequences", "busy", "rates"
    )
    for engine in placement.engines:
        kinds = sorted({rate.kind for rate in engine.rates})
        worst = max((rate.error for rate in engine.rates), default=0.0)
        table.add_row(
            engine.name,
            engine.chip,
            *([TITLES[engine.kind]] if unlike else []),
            engine.role,
            str(engine.count),
            str(engine.tp),
            str(engine.max_num_seqs or "-"),
            f"{engine.busy:.0%}",
            f"{', '.join(kinds)}, ±{worst:.0%}",
        )
    return table


def _routes(placement: Placement) -> Table:
    table = _table("requests", "bucket", "prefill", "decode", "a second", "weight", "handoff")
    for route in placement.routes:
        same = route.prefill == route.decode
        table.add_row(
            route.bucket,
            route.prefill,
            "the same" if same else route.decode,
            f"{route.rate:.3g}",
            f"{route.weight:.0%}",
            "-" if same else f"{route.handoff * 1e3:.3g} ms",
        )
    return table


def _predicted(predicted: Predicted) -> Table:
    table = _table("predicted, nine of ten times within", "", "p50", "p99")
    table.add_row("time to first token", _range(predicted.ttft_p50), _range(predicted.ttft_p99))
    table.add_row("each further token", _range(predicted.tpot_p50), _range(predicted.tpot_p99))
    return table


def _simulated(simulated: Simulated) -> Table:
    at = f"{simulated.requests} requests at {simulated.multiple:.4g} of the rate"
    table = _table(f"simulated, {at}: {simulated.attained:.2%} in time", "", "p50", "p99")
    table.add_row("time to first token", _ms(simulated.ttft_p50), _ms(simulated.ttft_p99))
    table.add_row("each further token", _ms(simulated.tpot_p50), _ms(simulated.tpot_p99))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _range(value: Range) -> str:
    return f"{_ms(value.value)} ({_ms(value.low)} to {_ms(value.high)})"


def _notes(placement: Placement) -> Iterator[RenderableType]:
    for binding in placement.bindings:
        yield Text(f"limited by {binding.kind} {binding.name}: {binding.shadow_price:+.4g} for one more")
    if placement.valid_while is not None:
        valid = placement.valid_while
        yield Text(
            f"valid up to {valid.rate_at_most:.4g} requests/s, arrivals no burstier than {valid.burstiness_at_most:g}, "
            f"links at {valid.links_at_least:.0%} of their bandwidth or more"
        )
    if placement.split is not None:
        alone = placement.split.aggregated
        text = "nothing" if alone is None else f"{alone:.4g}"
        yield Text(f"with handoffs {placement.split.split:.4g}, without {text} ({placement.unit})")
    if placement.fallback is not None and placement.fallback.engines:
        engines = ", ".join(f"{count} x {name}" for name, count in placement.fallback.engines.items())
        yield Text(f"without any handoff, up to {placement.fallback.rate:.4g} requests/s: {engines}")


def _sensitivity(placement: Placement) -> Iterator[RenderableType]:
    for one in placement.sensitivity:
        values = [
            "nothing serves it" if value is None else f"{value:.4g} {placement.unit}"
            for value in (one.slower, one.faster)
        ]
        what = "would change the answer" if one.changes else "would not change which chips do what"
        yield Text(
            f"measuring {one.pool} (±{one.error:.0%}) {what}: slower, {values[0]}; faster, {values[1]}; "
            f"these engines would serve {one.sustains:.0%} of the rate if it is slower"
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

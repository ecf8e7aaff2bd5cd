"""`deeplink measure`: what a running engine does, as a table of rates for the solver."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.cli import terminal
from deeplink.errors import ConfigError, DeeplinkError

if TYPE_CHECKING:
    from deeplink.measure.engine import Progress
    from deeplink.solver.estimates.rates import Measurement
    from deeplink.solver.kinds import Kind


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 128,512") from None
    if min(sizes) < 1 or max(sizes) > 1 << 22:
        raise click.BadParameter("sizes are at least 1, and at most 4 million")
    return sizes


@click.command("measure", short_help="What a running engine does, as a table of rates for the solver.")
@click.argument("url")
@click.option("--chip", default="", help="What the rows say it runs on, as in the fleet file.")
@click.option("--model", default="", help="What the rows call the model.  [default: as the engine does]")
@click.option(
    "--engine",
    "kind",
    type=click.Choice(["vllm", "sglang", "lmdeploy"]),
    help="Which engine the rows say it is.  [default: what it says itself]",
)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Chips of the engine's group.")
@click.option(
    "--prompts",
    callback=_sizes,
    metavar="SIZES",
    default="128,256,512,1024",
    show_default=True,
    help="Lengths to prefill.",
)
@click.option(
    "--batches", callback=_sizes, metavar="SIZES", default="1,2,4", show_default=True, help="Requests at a time."
)
@click.option(
    "--contexts",
    callback=_sizes,
    metavar="SIZES",
    default="128,512,1024",
    show_default=True,
    help="Lengths to decode behind.",
)
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Of every point.")
@click.option("--key-file", type=click.Path(dir_okay=False, path_type=Path), help="A file with the endpoint's API key.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=300.0, show_default=True, help="For the requests of a point."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the table here.  [default: to stdout]"
)
@click.option(
    "--link",
    "config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Instead: URL is a router with this deeplink.toml; measure what its handoffs add, by --prompts.",
)
@click.option(
    "--rest",
    type=click.FloatRange(min=0, max=60),
    default=2.0,
    show_default=True,
    help="Seconds before each request of --link, in which engines come to rest.",
)
def command(
    url: str,
    chip: str,
    model: str,
    kind: Kind | None,
    tp: int,
    prompts: tuple[int, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    repeats: int,
    key_file: Path | None,
    seconds: float,
    out: Path | None,
    config: Path | None,
    rest: float,
) -> None:
    """Measure the engine whose OpenAI endpoint is at URL: prefill by length and batch, decode by batch and context.

    Nothing else should use the engine meanwhile. The rows are what docs/solver.md describes, one for each repeat; a
    fleet file takes them with [[rates]].
    """
    console = terminal.console(stderr=True)

    def progress(line: str) -> None:
        console.print(terminal.cell(line), style="dim", soft_wrap=True)

    try:
        if out is not None:
            _require_writable(out)  # known before what takes long is measured
        if config is not None:
            text = _links(url.rstrip("/"), config, prompts, repeats, seconds, rest, progress)
        else:
            if not chip:
                raise click.UsageError("--chip says what the rows are about")
            from deeplink.measure import engine
            from deeplink.solver.estimates import table

            key = _key(key_file) if key_file else ""
            plan = engine.Plan(
                url=url.rstrip("/"),
                chip=chip,
                model=model,
                tp=tp,
                engine=kind or "",
                prompts=prompts,
                batches=batches,
                contexts=contexts,
                repeats=repeats,
                key=key,
                seconds=seconds,
            )
            rows = list(engine.measure(plan, progress))
            _show(rows)
            text = table.write(rows)
        if out is None:
            click.echo(text, nl=False)
        else:
            out.write_text(text)
    except DeeplinkError as exc:
        console.print(f"[bold red]{exc.code}[/]", end=": ")
        console.print(terminal.printable(str(exc)), markup=False, soft_wrap=True)
        sys.exit(1)
    except OSError as exc:
        raise click.ClickException(f"{exc.filename}: {exc.strerror}") from exc


def _key(path: Path) -> str:
    try:
        key = path.read_text().strip()
    except UnicodeDecodeError:
        key = ""
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{path} is not the file of a key: it has other than one line of ASCII characters",
            field="key-file",
            remedy="write the endpoint's key into a file, and nothing else",
        )
    return key


def _require_writable(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    there = path.exists()
    with path.open("ab"):
        pass
    if not there:
        path.unlink()


def _links(
    url: str,
    config: Path,
    prompts: tuple[int, ...],
    repeats: int,
    seconds: float,
    rest: float,
    progress: Progress,
) -> str:
    from deeplink import config as configs
    from deeplink.measure import link

    found = list(link.measure(url, configs.load(config), prompts, repeats, progress, seconds=seconds, rest=rest))
    return "\n".join(one.as_toml() for one in link.links(found))


def _show(rows: list[Measurement]) -> None:
    """The median of each point, and how far its repeats are apart."""
    of: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for row in rows:
        of[row.phase, row.requests, row.tokens if row.phase == "prefill" else row.context].append(row.seconds)
    table = terminal.table("measured", "phase", "requests", "tokens", "ms", "spread")
    for (phase, requests, size), seconds in of.items():
        middle = sorted(seconds)[len(seconds) // 2]
        spread = f"{max(seconds) / min(seconds) - 1:.0%}"
        table.add_row(phase, str(requests), f"{size:.0f}", f"{middle * 1e3:.2f}", spread)
    terminal.console(stderr=True).print(table)

"""`deeplink contract`: what an engine states about its cache, and whether two engines can hand over.

Exit codes, for scripts: 0 agreed (or shown), 1 refused, 2 a contract could not be read.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

from deeplink import config as configs
from deeplink import lookup
from deeplink.cli.terminal import NONE, cell, console, printable, table
from deeplink.errors import DeeplinkError
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.contracts.compare import Comparison, compare, fields
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.contracts.negotiate import Agreement, Refusal

REFUSED = 1
UNREADABLE = 2
Direction = tuple[str, str, Agreement | Refusal]
"""Producer and consumer as they were named, and what negotiation makes of them."""

_config = click.option(
    "--config",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"deeplink.toml, for names of engines and the secret; default: the file {configs.VARIABLE} names",
)
_api = click.option("--api", is_flag=True, help="A URL is that of an OpenAI endpoint: ask its control endpoint.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("contract")
def command() -> None:
    """What an engine states about its cache, and whether two engines can hand over.

    ENGINE is an engine's name in deeplink.toml, the URL of its control endpoint or of its OpenAI endpoint, or a file
    that holds a contract: as served, or as `show --json` prints it.
    """


@command.command("show")
@click.argument("engine")
@_config
@_api
@_json
def show(engine: str, path: Path | None, api: bool, as_json: bool) -> None:
    """Print the contract of ENGINE."""
    contract = _read(engine, path, api)
    if as_json:
        click.echo(contracts.to_json(contract))
    else:
        console().print(_contract_table(contract))


@command.command("diff", short_help="Whether A and B can hand over, and in what they differ.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@_config
@_api
@_json
def diff(first: str, second: str, path: Path | None, api: bool, as_json: bool) -> None:
    """Whether engines A and B can hand over to each other, and in what they differ.

    Exits with 0 when they agree, 1 when one refuses the other, 2 when a contract could not be read.
    """
    found = compare(_read(first, path, api), _read(second, path, api))
    both = ((first, second, found.forth), (second, first, found.back))
    directions = [(producer, consumer, answer) for producer, consumer, answer in both if answer is not None]
    if as_json:
        click.echo(_comparison_json(found, directions))
    else:
        screen = console()
        for direction in directions:
            screen.print(_sentence(*direction), soft_wrap=True)
        screen.print(_differences_table(first, second, found) if found.differences else "no field differs")
    if not found.agreed:
        sys.exit(REFUSED)


class _Unreadable(click.ClickException):
    exit_code = UNREADABLE


def _read(engine: str, path: Path | None, api: bool) -> Contract:
    try:
        return lookup.find(engine, configs.load(path), api).contract
    except DeeplinkError as exc:
        raise _Unreadable(printable(f"{engine}: {exc.code}: {exc}")) from exc


def _comparison_json(found: Comparison, directions: list[Direction]) -> bytes:
    value = {
        "agreed": found.agreed,
        "directions": [
            {
                "producer": printable(producer),
                "consumer": printable(consumer),
                "agreement": answer if isinstance(answer, Agreement) else None,
                "refusal": answer if isinstance(answer, Refusal) else None,
            }
            for producer, consumer, answer in directions
        ],
        "differences": found.differences,
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _sentence(producer: str, consumer: str, answer: Agreement | Refusal) -> Text:
    text = Text(printable(f"{producer} -> {consumer}: "))
    if isinstance(answer, Agreement):
        return text.append(str(answer), "green")
    text.append(f"refused by {answer.field}", "bold red")
    for name, value in ((producer, answer.ours), (consumer, answer.theirs), ("remedy", answer.remedy)):
        text.append(printable(f"\n  {name}: {value or NONE}"))
    return text


def _contract_table(contract: Contract) -> Table:
    shown = table(f"contract of {contract.engine} {contract.engine_version} on {contract.chip}", "field", "value")
    for _, section in groupby(fields(contract).items(), lambda item: item[0].rpartition(".")[0]):
        shown.add_section()
        for name, value in section:
            shown.add_row(name, cell(value))
    return shown


def _differences_table(first: str, second: str, found: Comparison) -> Table:
    shown = table("what differs", "field", first, second, "")
    for one in found.differences:
        decides = Text("decides", "bold red") if one.decides else Text("informs only", "dim")
        shown.add_row(one.field, cell(one.ours), cell(one.theirs), decides)
    return shown

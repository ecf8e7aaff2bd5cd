"""`deeplink contract`: what an engine states about its cache, and whether two engines can hand over.

Exit codes, for scripts: 0 agreed (or shown), 1 refused, 2 a contract could not be read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from urllib.parse import urlsplit

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deeplink import config as configs
from deeplink import secret as secrets
from deeplink.config import Config
from deeplink.errors import ConfigError, DeeplinkError, LocalError, ProtocolError
from deeplink.kvconnector import contract as contracts
from deeplink.kvconnector.compare import Comparison, compare, fields
from deeplink.kvconnector.contract import Contract
from deeplink.kvconnector.negotiate import Agreement, Refusal
from deeplink.local import client

REFUSED = 1
UNREADABLE = 2
NONE = "-"
Direction = tuple[str, str, Agreement | Refusal]
"""Producer and consumer as they were named, and what negotiation makes of them."""
_URL = re.compile(r"(https?://[^/\s?#@]+)(/v1)?/?")

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
        _console().print(_contract_table(contract))


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
        console = _console()
        for direction in directions:
            console.print(_sentence(*direction), soft_wrap=True)
        console.print(_differences_table(first, second, found) if found.differences else "no field differs")
    if not found.agreed:
        sys.exit(REFUSED)


class _Unreadable(click.ClickException):
    exit_code = UNREADABLE


def _read(engine: str, path: Path | None, api: bool) -> Contract:
    try:
        config = configs.load(path)
        controls = {entry.name: entry.control for entry in config.engines}
        if "://" in engine:
            return _fetch(_controls(engine, api), config)
        if engine in controls:
            return _fetch([controls[engine]], config)
        return _open(engine, controls)
    except DeeplinkError as exc:
        raise _Unreadable(_printable(f"{engine}: {exc.code}: {exc}")) from exc


def _controls(url: str, api: bool) -> list[str]:
    """Where the contract may be: at the URL, or at the control endpoint that goes with it as an OpenAI endpoint."""
    match = _URL.fullmatch(url)
    try:
        if match is None or urlsplit(match[1]).port == 0:  # raises ValueError itself for what is no port at all
            raise ValueError("write http://host:port")
    except ValueError as exc:
        raise ConfigError(f"not the URL of an engine: {exc}") from exc
    control = configs.control_url(match[1])
    return [control] if api or match[2] else [match[1], control]


def _fetch(controls: list[str], config: Config) -> Contract:
    token = secrets.control_token(secrets.load(config.secret_file))
    failed = []
    for control in controls:
        try:
            return contracts.decode(
                client.get(f"{control}/v1/contract", token, "application/msgpack", contracts.MAX_BYTES)
            )
        except LocalError as exc:
            failed.append(exc.message)
        except ProtocolError as exc:
            failed.append(f"{control}/v1/contract: {exc}")
    raise LocalError("; and ".join(failed))


def _open(name: str, engines: Iterable[str]) -> Contract:
    try:
        with open(name, "rb") as file:
            data = file.read(contracts.MAX_JSON_BYTES + 1)
    except FileNotFoundError as exc:
        known = ", ".join(engines) or "none"
        raise ConfigError(f"no URL, no file, and no engine in deeplink.toml (known: {known})") from exc
    except (OSError, ValueError) as exc:  # ValueError: what cannot be the name of a file
        raise ConfigError(f"cannot read the file: {exc}") from exc
    return contracts.from_json(data) if data.lstrip()[:1] == b"{" else contracts.decode(data)


def _comparison_json(found: Comparison, directions: list[Direction]) -> bytes:
    value = {
        "agreed": found.agreed,
        "directions": [
            {
                "producer": _printable(producer),
                "consumer": _printable(consumer),
                "agreement": answer if isinstance(answer, Agreement) else None,
                "refusal": answer if isinstance(answer, Refusal) else None,
            }
            for producer, consumer, answer in directions
        ],
        "differences": found.differences,
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _sentence(producer: str, consumer: str, answer: Agreement | Refusal) -> Text:
    text = Text(_printable(f"{producer} -> {consumer}: "))
    if isinstance(answer, Agreement):
        return text.append(str(answer), "green")
    text.append(f"refused by {answer.field}", "bold red")
    for name, value in ((producer, answer.ours), (consumer, answer.theirs), ("remedy", answer.remedy)):
        text.append(_printable(f"\n  {name}: {value or NONE}"))
    return text


def _contract_table(contract: Contract) -> Table:
    table = _table(f"contract of {contract.engine} {contract.engine_version} on {contract.chip}", "field", "value")
    for _, section in groupby(fields(contract).items(), lambda item: item[0].rpartition(".")[0]):
        table.add_section()
        for name, value in section:
            table.add_row(name, _cell(value))
    return table


def _differences_table(first: str, second: str, found: Comparison) -> Table:
    table = _table("what differs", "field", first, second, "")
    for one in found.differences:
        decides = Text("decides", "bold red") if one.decides else Text("informs only", "dim")
        table.add_row(one.field, _cell(one.ours), _cell(one.theirs), decides)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=_cell(title))
    for column in columns:
        table.add_column(_cell(column) if column else "", overflow="fold")
    return table


def _cell(text: str) -> Text:
    return Text(_printable(text or NONE))


def _printable(text: str) -> str:
    """What a peer or a file says must not steer the terminal, and the name of a file need not be Unicode."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _console() -> Console:
    """As wide as the terminal; wide enough for the tables where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)

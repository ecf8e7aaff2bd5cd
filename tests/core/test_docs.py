"""The docs name every setting, hook, error, variable, command and option there is, and no other."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path
from typing import get_args

import click
from pydantic import BaseModel

from deeplink import config, hookspecs, plugins
from deeplink.cli import main
from deeplink.errors import DeeplinkError
from deeplink.kvconnector import compiled
from lmdeploy_deeplink.engine import waiting
from sglang_deeplink import hooks
from vllm_deeplink import asked, platform

DOCS = Path(__file__).parents[2] / "docs"


def _first_column(page: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` ", (DOCS / page).read_text(), re.MULTILINE))


def _settings(model: type[BaseModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        if name == "engines":
            found |= _settings(config.EngineEntry, "engines[].")
        elif name == "routes":
            found |= _settings(config.RouteEntry, "routes[].")
        elif sections := [kind for kind in kinds if issubclass(kind, BaseModel)]:
            found |= _settings(sections[0], f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def test_every_setting_and_variable() -> None:
    named = _first_column("config.md")
    variables = {config.VARIABLE, plugins.ONLY, plugins.DISABLE, plugins.TRACE, compiled.VARIABLE}
    variables |= {platform.VARIABLE, asked.ROLE, asked.PORT, asked.ROUTER, hooks.FORCE, waiting.VARIABLE}
    assert {name for name in named if name.isupper() or "DEEPLINK_" in name} == variables
    settings = {name for name in named if not name.startswith(("-", "DEEPLINK_", "GET", "DELETE"))}
    assert settings == _settings(config.Config)


def test_every_extra() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", (DOCS / "install.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == set(metadata("deeplink").get_all("Provides-Extra") or ())


def test_every_hook() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("deeplink_")}
    assert {name.split("(")[0] for name in _first_column("hooks.md")} == hooks


def test_every_error_code_with_its_status() -> None:
    def tree(kind: type[DeeplinkError]) -> dict[str, int]:
        found = {kind.code: kind.status}
        for sub in kind.__subclasses__():
            found |= tree(sub)
        return found

    rows = re.findall(r"^\| `([a-z_]+)` \| (\d+) ", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert {code: int(status) for code, status in rows} == tree(DeeplinkError)


def _commands(command: click.Command, name: str) -> dict[str, set[str]]:
    """The options of every command that does something, by its whole name."""
    if not isinstance(command, click.Group):
        return {name: {parameter.opts[0] for parameter in command.params if isinstance(parameter, click.Option)}}
    context = click.Context(command)
    found = {}
    for inner in command.list_commands(context):
        sub = command.get_command(context, inner)
        assert sub is not None
        found |= _commands(sub, f"{name} {inner}")
    return found


def test_every_command_and_its_options() -> None:
    real = _commands(main, "deeplink")
    assert {name for name in _first_column("cli.md") if not name.startswith("--")} == set(real)
    _, *sections = re.split(r"^## ", (DOCS / "cli.md").read_text(), flags=re.MULTILINE)
    told = {}
    for section in sections:
        title = section.splitlines()[0]
        name = " ".join(word for word in title.split() if word.islower())
        told[name] = set(re.findall(r"^\| `(--[a-z-]+)` ", section, re.MULTILINE))
    assert told == real

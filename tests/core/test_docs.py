"""The docs name every setting, hook, error, variable, command, option and page there is, and no other."""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import get_args

import click
import pytest
from pydantic import BaseModel

from deeplink import config, hookspecs, plugins
from deeplink.cli import main
from deeplink.errors import DeeplinkError
from deeplink.kvconnector.relayout import compiled
from lmdeploy_deeplink.engine import waiting
from sglang_deeplink import hooks
from vllm_deeplink import asked, flags, platform

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    assert len(rows) == len(tree(DeeplinkError))
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


def test_every_page_is_named_where_one_begins() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    assert set(re.findall(r"\]\(docs/([a-z-]+\.md)", readme)) == {page.name for page in DOCS.glob("*.md")}


PAGES = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_are_there_with_these_options(page: Path) -> None:
    real = _commands(main, "deeplink")
    shown = "\n".join([*_blocks(page, "sh"), *re.findall(r"`(deeplink [^`]+)`", page.read_text())])
    for line in re.findall(r"^(?:\$ )?deeplink .*", shown.replace("\\\n", ""), re.MULTILINE):
        words = line.removeprefix("$ ").partition(" #")[0].split()
        named = [name for name in real if words[: name.count(" ") + 1] == name.split()]
        groups = {name.rpartition(" ")[0] for name in real if name.count(" ") == 2}
        assert named or " ".join(words) in groups or words[1] == "…" or words[1].startswith("--"), line
        for name in named:
            if name != "deeplink serve lmdeploy":  # which takes LMDeploy's own
                assert {word for word in words if word.startswith("--")} <= {*real[name], "--help"}, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_of_engines_that_are_shown_are_there(page: Path) -> None:
    parser = flags._add(argparse.ArgumentParser())
    real = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"--deeplink-[a-z-]+", page.read_text())) <= real


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_that_are_shown_are_good(page: Path) -> None:
    for text in _blocks(page, "toml"):
        data = tomllib.loads(text)
        if not data.keys() & {"project", "pools"}:  # of a package, and of a fleet
            config.parse(data, page.name)


def _anchors(page: Path) -> set[str]:
    """As GitHub names headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower().replace("`", "")).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "benchmarks" / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link

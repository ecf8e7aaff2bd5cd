"""docs/solver.md names every key of a fleet file, and every column of a table, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from deeplink.solver import placement
from deeplink.solver.estimates import table
from deeplink.solver.fleets import fleetfile, sections
from deeplink.solver.place import place

PAGE = Path(__file__).parents[2] / "docs" / "solver.md"


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = [kind for kind in kinds if issubclass(kind, BaseModel)]
        if inner:
            many = str(field.annotation).startswith("tuple")
            yield from keys(inner[0], f"{key}[]." if many else f"{key}.")
        else:
            yield key


def section(title: str) -> str:
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    return [
        name for cell in re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)
    ]


def test_every_key() -> None:
    assert first_column(section("fleet.toml")) == list(keys(sections.FleetFile))


def test_every_column() -> None:
    text = section("Where times come from")
    columns = table.COLUMNS + table.OPTIONAL
    assert [name for name in first_column(text) if name in columns] == list(columns)


def test_every_field_it_names_is_one() -> None:
    assert set(first_column(section("The placement"))) <= set(placement.Placement.__struct_fields__)


def test_the_example_is_one(tmp_path: Path) -> None:
    from described import CONFIG, write

    text = PAGE.read_text().split("```toml\n")[1].split("```")[0]
    fleet = fleetfile.load(write(tmp_path, text))
    assert CONFIG["num_hidden_layers"] == fleet.model.layers
    assert [pool.name for pool in fleet.pools] == ["hopper", "h20"]


def test_the_pool_of_another_engine_is_one(tmp_path: Path) -> None:
    from described import FLEET, write

    text = PAGE.read_text().split("### Which engine")[1].split("```toml\n")[1].split("```")[0]
    found = place(fleetfile.load(write(tmp_path, FLEET + text)))
    assert [line for line in found.skipped if line.startswith("c550: ") and "host memory" in line]
    assert not [refused for refused in found.skipped if refused.startswith("h")]


def test_what_the_cluster_is_said_to_get_is_what_it_gets(tmp_path: Path) -> None:
    from described import write

    page = (PAGE.parent / "cluster.md").read_text()
    (text,) = [block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[[pools]]" in block]
    found = place(fleetfile.load(write(tmp_path, text)))
    assert sorted((one.chip, one.role, one.tp, one.count) for one in found.engines) == [
        ("NVIDIA H100 SXM", "prefill", 2, 1),
        ("NVIDIA H20", "decode", 2, 1),
    ]
    for part in (f"for {found.value:g} an hour", f"without handoffs it would be {found.split.aggregated:g}"):
        assert part in page

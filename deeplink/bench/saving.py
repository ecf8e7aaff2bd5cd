"""A result as files: JSON, a plot beside it, and the table in the README of the folder above."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deeplink.bench import plot
from deeplink.bench.rows import write_table
from deeplink.errors import LocalError


def save(result: dict[str, Any], target: Path) -> Iterator[str]:
    """Says what it has written, or why not. The place in README.md is between lines ``<!-- NAME: begin -->`` and
    ``<!-- NAME: end -->``, with the name of the file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    yield f"written: {target}"
    picture = target.with_suffix(".svg")
    try:
        plot.draw(result, picture)
        yield f"written: {picture}"
    except LocalError as exc:
        yield f"no plot: {exc}"
    page = target.resolve().parent.parent / "README.md"
    if page.is_file() and f"<!-- {target.stem}: begin -->" in page.read_text():
        write_table(page, target.stem, result)
        yield f"written: {page}"

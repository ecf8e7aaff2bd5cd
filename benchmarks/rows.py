"""Where the results of benchmarks are kept in this repository; their form is the package's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deeplink.bench import rows
from deeplink.bench.rows import Row, machine, table

__all__ = ["RESULTS", "Row", "machine", "table", "write_table"]

RESULTS = Path(__file__).with_name("results")


def write_table(name: str, result: dict[str, Any]) -> None:
    """Put the rows into README.md, between the markers of this benchmark."""
    rows.write_table(Path(__file__).with_name("README.md"), name, result)

"""The support matrix is written in parts; a run that writes one leaves the others as they are."""

from __future__ import annotations

import json
from pathlib import Path

import sections


def test_a_part_replaces_itself_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "support-matrix.md").write_text("# Support matrix\n\nBy hand.\n")
    sections.write("one", [1], "## One\n\n| a\\b |", tmp_path)
    sections.write("two", {"x": 2}, "## Two", tmp_path)
    sections.write("one", [3], "## One\n\nagain", tmp_path)
    assert json.loads((tmp_path / "support-matrix.json").read_text()) == {"one": [3], "two": {"x": 2}}
    page = (tmp_path / "support-matrix.md").read_text()
    assert page == (
        "# Support matrix\n\nBy hand.\n\n<!-- one: begin -->\n## One\n\nagain\n<!-- one: end -->\n\n"
        "<!-- two: begin -->\n## Two\n<!-- two: end -->\n"
    )


def test_the_matrix_that_is_there_can_be_written_to() -> None:
    """Its page and its JSON have the same parts."""
    page = (sections.DOCS / "support-matrix.md").read_text()
    for name in json.loads((sections.DOCS / "support-matrix.json").read_text()):
        assert page.count(f"<!-- {name}: begin -->") == page.count(f"<!-- {name}: end -->") == 1

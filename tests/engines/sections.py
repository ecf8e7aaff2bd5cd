"""`docs/support-matrix.*`: one part per test run that writes there, so that none erases another's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def write(name: str, data: object, text: str, folder: Path = DOCS) -> None:
    """`data` becomes the key `name` of the JSON, `text` what lies between the marks of that name in the page.

    A part that is not there yet is put at the end.
    """
    file, page = folder / "support-matrix.json", folder / "support-matrix.md"
    parts = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(_json({**parts, name: data}))
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    part = f"{begin}\n{text.rstrip()}\n{end}\n"
    old = page.read_text() if page.exists() else ""
    if begin in old:
        page.write_text(re.sub(f"{re.escape(begin)}.*?{re.escape(end)}\n", lambda _: part, old, flags=re.DOTALL))
    else:
        page.write_text(f"{old.rstrip()}\n\n{part}".lstrip())


def _json(parts: Mapping[str, object]) -> str:
    """The cells of a list one a line."""
    texts = []
    for name, value in parts.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(f"    {json.dumps(cell)}" for cell in value)
            texts.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        else:
            texts.append(f"  {json.dumps(name)}: " + json.dumps(value, indent=2).replace("\n", "\n  "))
    return "{\n" + ",\n".join(texts) + "\n}\n"

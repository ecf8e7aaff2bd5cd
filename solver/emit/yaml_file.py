"""YAML documents with comments at the top."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from deeplink.errors import SolverError


def text(documents: Iterable[Any], comments: Iterable[str]) -> str:
    """The documents in one file. Raises SolverError where the package that writes YAML is missing."""
    try:
        import yaml
    except ImportError as exc:
        raise SolverError("a package to write YAML is missing", remedy="pip install 'deeplink[solver]'") from exc

    class Dumper(yaml.SafeDumper):
        """Text of several lines as a block."""

    Dumper.add_representer(
        str,
        lambda dumper, value: dumper.represent_scalar(
            "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
        ),
    )
    # Through JSON, so that nothing is written as an anchor because it is the same object.
    parts = [yaml.dump(json.loads(json.dumps(one)), Dumper=Dumper, sort_keys=False, width=1 << 16) for one in documents]
    return "".join(f"# {line}\n" for line in comments) + "---\n".join(parts)

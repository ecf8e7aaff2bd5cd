"""The interfaces of released vLLMs, as `tools/describe_vllm.py` read them from their wheels."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_deeplink.versions.interface import Described, Interface, Method

FOLDER = Path(__file__).with_name("interfaces")
VERSIONS = sorted(path.stem.removeprefix("vllm-") for path in FOLDER.glob("vllm-*.json"))


def load(version: str) -> Interface:
    data = json.loads((FOLDER / f"vllm-{version}.json").read_text())
    classes = {
        place: Described(
            tuple(one["bases"]),
            {name: Method(tuple(texts), name in one["abstract"]) for name, texts in one["methods"].items()},
            frozenset(one["attributes"]),
        )
        for place, one in data["classes"].items()
    }
    return Interface(data["version"], classes)

"""What programs of this folder, and engines, are started with."""

from __future__ import annotations

import sys
from pathlib import Path

from deeplink.local import overlay

HERE = Path(__file__).parent


def variables() -> dict[str, str]:
    """Of an LMDeploy engine that finds this checkout and looks for nothing outside."""
    return {
        "PYTHONPATH": f"{overlay.ensure(say)}:{HERE}",
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def say(text: str) -> None:
    print(text, file=sys.stderr)

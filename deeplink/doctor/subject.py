"""What the doctor looks at. It is made without an error: what is wrong with it is what the doctor is there to say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from deeplink import config as configs
from deeplink import plugins as plugin
from deeplink.config import Config
from deeplink.errors import DeeplinkError
from deeplink.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a self-test does: `size` bytes each way over each transport, within `seconds`."""

    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Subject:
    """`source` is the file that `config` is from; empty for the defaults."""

    source: str
    config: Config | DeeplinkError
    plugins: Plugins | DeeplinkError
    effort: Effort


def gather(path: Path | None, effort: Effort) -> Subject:
    """Read what an engine that is started here and now would read. Makes nothing, not even a secret."""
    source = str(path or os.environ.get(configs.VARIABLE) or "")
    config: Config | DeeplinkError
    plugins: Plugins | DeeplinkError
    try:
        config = configs.load(path)
    except DeeplinkError as exc:
        config = exc
    try:
        plugins = plugin.load_plugins()
    except DeeplinkError as exc:
        plugins = exc
    return Subject(source, config, plugins, effort)

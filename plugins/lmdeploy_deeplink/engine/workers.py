"""The file by which the workers of Ray, which deeplink does not start, learn of it: `deeplink serve workers`.

Python runs the line of that file, `deeplink-lmdeploy.pth` in the folder of its packages, at every start. The line looks
for a variable of the environment, which `deeplink serve lmdeploy` sets for all that it starts, and does nothing where
it is not there. Where it is, `lmdeploy_deeplink.engine.waiting` waits for LMDeploy.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path

from deeplink.errors import PluginError
from lmdeploy_deeplink.engine import waiting

FILE = "deeplink-lmdeploy.pth"
LINE = (
    f'import os; os.environ.get("{waiting.VARIABLE}") and '
    f'__import__("{waiting.__name__}", fromlist=["{waiting.wait.__name__}"]).{waiting.wait.__name__}()\n'
)


def place() -> Path:
    """Where this Python looks for the file."""
    return Path(sysconfig.get_path("purelib")) / FILE


def enabled() -> bool:
    """Whether the file is there. Raises PluginError where there is one of this name that deeplink has not written."""
    try:
        found = place().read_bytes()
    except FileNotFoundError:
        return False
    if found != LINE.encode():
        raise PluginError(
            f"{place()} is not what this release of deeplink writes",
            field=FILE,
            remedy="look at it, and remove it by hand",
        )
    return True


def enable() -> None:
    """Write the file whole or not at all. Raises PluginError as `enabled` does, and where it cannot be written."""
    if enabled():
        return
    folder = place().parent
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
    except OSError as exc:
        raise PluginError(f"{folder} cannot be written to: {exc}", field=FILE) from exc
    with os.fdopen(descriptor, "w") as file:
        file.write(LINE)
    os.chmod(name, 0o644)
    os.replace(name, place())


def disable() -> None:
    """Remove the file. Raises PluginError as `enabled` does, and where it cannot be removed."""
    if not enabled():
        return
    try:
        place().unlink(missing_ok=True)
    except OSError as exc:
        raise PluginError(f"{place()} cannot be removed: {exc}", field=FILE) from exc

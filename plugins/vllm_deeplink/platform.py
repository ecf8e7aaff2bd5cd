"""``--platform deeplink`` and the platform that vLLM runs on: the native one or a vendor's, never one of deeplink's.

vLLM has one active platform. deeplink has an entry point among the platform plugins too, which never offers one: it is
where a plugin of a vendor that keeps vLLM from starting at all is explained. Once deeplink is asked for, the class of
the active platform, whoever it is of, is decorated in place, so that it stays what everything in vLLM takes it for.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.errors import ConfigError, PluginError
from vllm_deeplink import CONNECTOR, beside, vendors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VARIABLE = "DEEPLINK_PLATFORM"
NAME = "deeplink"
MAX_FILE = 1 << 20
_IN_FILE = re.compile(rf"""^\s*platform\s*:\s*["']?{NAME}["']?\s*(#.*)?$""", re.MULTILINE)

log = logging.getLogger("vllm.deeplink")
_explaining = False


def explain() -> None:
    """While vLLM looks for its platform: tell what is wrong with a vendor's plugin, if deeplink is asked for.

    It cannot be raised here, where vLLM takes whatever is raised for "not this platform"; `attach` raises it, if vLLM
    gets so far.
    """
    global _explaining
    if _explaining or vendors.wants_processor() or not asked(sys.argv):
        return
    _explaining = True  # the import of a vendor's class may ask for the platform again
    try:
        vendors.check(vendors.look())
    except PluginError as exc:
        log.error("deeplink: %s", exc)
    finally:
        _explaining = False


def asked(words: Sequence[str]) -> bool:
    """Whether deeplink is asked for, as far as that can be known before the command line is parsed."""
    if os.environ.get(VARIABLE) == NAME:
        return True
    values = dict(pairwise(words))
    values |= {name: value for name, _, value in (word.partition("=") for word in words) if value}
    return values.get("--platform") == NAME or _in_file(values.get("--config"))


def _in_file(path: str | None) -> bool:
    if path is None:
        return False
    try:
        with Path(path).open(encoding="utf-8") as file:
            return _IN_FILE.search(file.read(MAX_FILE)) is not None
    except (OSError, UnicodeDecodeError):
        return False  # vLLM reads the same file, and says what is wrong with it


def attach() -> None:
    """Deeplink is asked for: decorate the platform that vLLM runs on.

    Raises PluginError if a vendor's plugin is broken, if two want to serve, or if a chip is here and nothing serves it.
    """
    # Whoever says the processor gets it from vLLM, which then looks at no plugin at all.
    found = () if vendors.wants_processor() else vendors.look()
    serving = vendors.check(found)
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if serving is None and (current_platform.is_cpu() or current_platform.is_unspecified()):
        _check_chips(found)
    if current_platform.is_unspecified():
        raise PluginError(
            "vLLM found no platform to run on",
            field="platform",
            theirs=platform.__qualname__,
            remedy="install the build of vLLM for the chips that are here, or their vendor's plugin; `deeplink chips` "
            "says which chips those are, and who serves them",
        )
    where = "vLLM's own" if serving is None else f"of {serving.distribution} {serving.version}"
    log.info("deeplink runs on the platform %s, %s", platform.__qualname__, where)
    decorate(platform)


def decorate(platform: Any) -> None:
    """Once per class: after its own look at the config, see that the connector is still there."""
    if "_deeplink" in vars(platform):
        return
    its_own = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: VllmConfig) -> None:
        before = _connector(vllm_config)
        its_own(cls, vllm_config)
        after = _connector(vllm_config)
        if before in (CONNECTOR, beside.SEVERAL) and before != after:
            raise ConfigError(
                f"the platform {cls.__qualname__} has replaced deeplink's KV connector",
                field="kv-transfer-config",
                ours=before,
                theirs=after,
                remedy="leave out the setting of the vendor's plugin that brings a connector of its own",
            )

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform._deeplink = True


def _connector(vllm_config: VllmConfig) -> str:
    transfer = vllm_config.kv_transfer_config
    return "none" if transfer is None else str(transfer.kv_connector)


def _check_chips(found: Sequence[vendors.Platform]) -> None:
    from deeplink.chips.detect import detect
    from deeplink.plugins import load_plugins

    profiles = load_plugins().chips.items.values()
    vendors.check_served(found, detect(profiles), profiles)

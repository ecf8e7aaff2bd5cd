"""What of caches on devices can be seen without torch; the rest is `device_check.py`, which an engine's Python runs."""

from __future__ import annotations

import subprocess
import sys

from loopback import LAYERS, NHD, make_cache, make_group

from deeplink.kvconnector.caches.group import Group


def test_a_cache_in_host_memory_is_as_it_is_now() -> None:
    group = Group(make_group(NHD, 16), tuple(range(LAYERS)), (0, 2), make_cache(NHD, 16))
    assert group.as_of_now().values is group.values


def test_the_module_brings_no_torch() -> None:
    code = "import sys; import deeplink.kvconnector.caches.device_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

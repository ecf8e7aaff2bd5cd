"""What detection of chips costs.

    python benchmarks/chips.py [--json] [--save]

Hosts are made as folders: cards of one vendor or of three among 200 functions on the bus, with their device nodes. A
tool is a shell script that answers at once, or one that hangs. The mark is reading every function's vendor number,
which nothing that looks at the bus can do without. A made host is in the page cache; a real sysfs reads from the
kernel's memory too. `this_host` is the machine that this runs on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rows import RESULTS, Row, machine, write_table

from deeplink.chips.catalogue import PROFILES
from deeplink.chips.detect import detect

GOAL_MS = 200.0
FUNCTIONS = 200
ROUNDS = 15
CSV = "echo '00000000:{:02x}:00.0, NVIDIA H100 80GB HBM3, 81559, 1.0'\n"


def function(root: Path, address: str, number: str, kind: str, driver: str) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    vendor, device = number.split(":")
    for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
        (folder / name).write_text(f"0x{value}\n")
    (folder / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")


def host(root: Path, *cards: tuple[int, str, str, str, str]) -> Path:
    """Each of `cards` is how many, the number on the bus, the class, the driver, and how their nodes' names begin."""
    (root / "dev").mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(Path("/proc/cpuinfo").read_text())
    slots = iter(range(256))
    for count, number, kind, driver, node in cards:
        for at in range(count):
            function(root, f"0000:{next(slots):02x}:00.0", number, kind, driver)
            (root / f"dev/{node}{at}").touch()
    for slot in slots:
        if len(os.listdir(root / "sys/bus/pci/devices")) < FUNCTIONS:
            function(root, f"0000:{slot:02x}:01.0", "15b3:101b", "020000", "mlx5_core")
    return root


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}")
    (folder / name).chmod(0o755)


def vendors(root: Path) -> None:
    """What anything that looks at the bus does."""
    folder = f"{root}/sys/bus/pci/devices"
    for name in os.listdir(folder):
        with open(f"{folder}/{name}/vendor", "rb") as file:
            int(file.read(), 16)


def milliseconds(run: Callable[[], object]) -> tuple[float, float]:
    """Best and median of some rounds."""
    spent = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        spent.append((time.perf_counter() - began) * 1000)
    return min(spent), sorted(spent)[ROUNDS // 2]


def rows(folder: Path) -> list[Row]:
    dies = host(folder / "ascend", (16, "19e5:d803", "120000", "devdrv_device_driver", "davinci"))
    gpus = host(folder / "gpus", (8, "10de:2330", "030200", "nvidia", "nvidia"))
    mixed = host(
        folder / "mixed",
        (8, "10de:2330", "030200", "nvidia", "nvidia"),
        (8, "19e5:d802", "120000", "devdrv_device_driver", "davinci"),
        (8, "1e36:c035", "120000", "enflame", "gcu"),
    )
    quick, hung = folder / "quick", folder / "hung"
    for tools in (quick, hung):
        tools.mkdir()
    script(quick, "nvidia-smi", "".join(CSV.format(slot) for slot in range(8)))
    for name in ("nvidia-smi", "npu-smi", "efsmi"):
        script(hung, name, "sleep 30\n")
    path = os.environ["PATH"]
    cases = (
        ("this_host", Path("/"), path),
        ("16_ascend_dies_no_tool", dies, path),
        ("8_gpus_tool_answers", gpus, f"{quick}:{path}"),
        ("8_gpus_tool_hangs", gpus, f"{hung}:{path}"),
        ("3_vendors_tools_hang", mixed, f"{hung}:{path}"),
    )
    found = []
    for name, root, where in cases:
        os.environ["PATH"] = where
        mark, _ = milliseconds(partial(vendors, root))
        best, median = milliseconds(partial(detect, PROFILES, root))
        print(f"{name}: best {best:.1f} ms, median {median:.1f} ms", file=sys.stderr)
        found.append(Row(f"detect_{name}", median, "ms", "vendor numbers alone", mark, GOAL_MS, "at most", "value"))
    os.environ["PATH"] = path
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    parser.add_argument("--save", action="store_true", help="write the result to results/ and the README")
    arguments = parser.parse_args()
    about = machine()
    with tempfile.TemporaryDirectory() as made:
        result = {"machine": about, "rows": [row.as_json() for row in rows(Path(made))]}
    if arguments.save:
        (RESULTS / "chips.json").write_text(json.dumps(result, indent=2) + "\n")
        write_table("chips", result)
    if arguments.json:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

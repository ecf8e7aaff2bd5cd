"""What the device tree says: PCI functions, device nodes, drivers. Reads files under a root, which tests make.

Nothing here raises for what it finds: a file that is not there or cannot be read is a value that is not known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deeplink.chips.profile import Vendor

PCI_DEVICES = "sys/bus/pci/devices"
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Function:
    """A PCI function of a vendor that makes chips. `driver` is the kernel's that is bound to it, or ""; `render` are
    names of render nodes it has."""

    address: str
    vendor: int
    device: int
    kind: str
    driver: str
    render: tuple[str, ...] = ()


def functions(root: Path, vendors: Iterable[Vendor]) -> tuple[Function, ...] | None:
    """All of these vendors' functions in a class that they make chips in, by address; None where there is no PCI tree,
    as in some containers."""
    folder = root / PCI_DEVICES
    wanted = {number for vendor in vendors for number in vendor.pci}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    found = []
    for name in names:
        vendor = _number(folder / name / "vendor")
        if vendor is None or vendor not in wanted:
            continue
        device, kind = _number(folder / name / "device"), read(folder / name / "class").removeprefix("0x")
        if device is not None and kind:
            at = folder / name
            render = tuple(sorted(node for node in _listing(at / "drm") if node.startswith("renderD")))
            found.append(Function(name.lower(), vendor, device, kind.lower(), _driver(at), render))
    return tuple(found)


def of_vendor(functions: Iterable[Function], vendor: Vendor) -> tuple[Function, ...]:
    return tuple(
        function for function in functions if function.vendor in vendor.pci and function.kind.startswith(vendor.classes)
    )


def nodes(root: Path, vendor: Vendor, its: Iterable[Function]) -> tuple[str, ...]:
    """The device nodes that each stand for one of the vendor's devices, as paths on the host. `its` are its functions,
    which with `drm` are all that says which nodes are its."""
    if vendor.drm:
        there = set(_listing(root / "dev/dri"))
        return tuple(f"/dev/dri/{name}" for function in its for name in function.render if name in there)
    paths = [f"/{vendor.folder}/{name}" for name in _listing(root / vendor.folder)]
    return tuple(sorted((path for path in paths if re.fullmatch(vendor.nodes, path)), key=_by_number))


def control_nodes(root: Path, vendor: Vendor) -> tuple[str, ...]:
    return tuple(path for path in vendor.control if os.path.lexists(root / path.lstrip("/")))


def driver_versions(root: Path, vendor: Vendor, drivers: Iterable[str]) -> dict[str, str]:
    """Versions of the drivers that are bound, and of the vendor's own files, by driver or by path on the host."""
    found = {}
    for driver in sorted({*drivers, *vendor.drivers}):
        if version := read(root / "sys/module" / driver / "version"):
            found[driver] = version
    for path, pattern in vendor.version_files:
        if match := re.search(pattern, read(root / path)):
            found[f"/{path}"] = match[1]
    return found


def read(path: Path) -> str:
    """A small file's text, one printable line after the other, or "" where it cannot be had."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "".join(c for c in text if c.isprintable() or c == "\n").strip()


def _number(path: Path) -> int | None:
    text = read(path)
    return int(text, 16) if re.fullmatch(r"0x[0-9a-f]{1,8}", text, re.IGNORECASE) else None


def _driver(function: Path) -> str:
    try:
        return os.path.basename(os.readlink(function / "driver"))
    except OSError:
        return ""


def _listing(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _by_number(path: str) -> tuple[str, int]:
    match = re.search(r"\d{1,9}$", path)
    return (path[: match.start()], int(match[0])) if match else (path, -1)

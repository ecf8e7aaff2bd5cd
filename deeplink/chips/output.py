"""What vendors' tools print, read. Every reader takes a tool's whole output and returns one entry per device; it raises
MalformedOutput for what it does not understand, and nothing else, whatever the text.

Fields that a tool leaves out, or fills with N/A, are "" or None. An output that is well-formed and lists nothing is an
empty tuple.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from deeplink.chips.profile import Reported

_ADDRESS = re.compile(r"(?:[0-9a-f]{0,4}([0-9a-f]{4}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_NUMBER = re.compile(r"\s*(\d{1,12})(?:\.\d{1,9})?\s*([KMG]i?B|B)?\s*", re.IGNORECASE)
_MIB = {"": 1.0, "B": 2**-20, "KB": 2**-10, "MB": 1.0, "GB": 2.0**10}
_NOTHING = {"", "n/a", "[n/a]", "na", "none", "not found", "unknown", "[not supported]", "null"}
_LONGEST = 80


class MalformedOutput(ValueError):
    """A tool printed something else than it is known to print."""


def query_csv(text: str) -> tuple[Reported, ...]:
    """`--query-gpu=pci.bus_id,name,memory.total,driver_version --format=csv,noheader,nounits`: nvidia-smi, and
    tools that answer to the same words."""
    found = []
    for line in _lines(text):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not (at := address(fields[0])):
            raise MalformedOutput(f"no line of four fields with an address first: {line[:_LONGEST]!r}")
        found.append(Reported(_words(fields[1]), at, _mib(fields[2]), _words(fields[3])))
    return tuple(found)


def names_csv(text: str) -> tuple[Reported, ...]:
    """`brsmi gpu --query-gpu=index,name --format=csv,noheader`."""
    found = []
    for line in _lines(text):
        index, comma, name = line.partition(",")
        if not comma or not index.strip().isdecimal():
            raise MalformedOutput(f"no index and name: {line[:_LONGEST]!r}")
        found.append(Reported(_words(name)))
    return tuple(found)


_NPU_NAME = re.compile(r"\|\s*\d+\s+(\S+)\s*\|\s*[^|]*\|[^|]*\|\s*")
_NPU_CHIP = re.compile(r"\|\s*\d+(?:\s+\d+)?\s*\|\s*([0-9a-f:.]+)\s*\|([^|]*)\|\s*", re.IGNORECASE)
_USED_OF = re.compile(r"\d+\s*/\s*(\d{1,9})")


def npu_smi(text: str) -> tuple[Reported, ...]:
    """`npu-smi info`: two rows a chip, its board's name and then its bus address. One board may have two chips."""
    version = re.search(r"Version:\s*(\S+)", text)
    if "npu-smi" not in text or version is None:
        raise MalformedOutput("no heading of npu-smi with its version")
    found, name = [], ""
    for line in _lines(text):
        if (chip := _NPU_CHIP.fullmatch(line)) and (at := address(chip[1])):
            if not name:
                raise MalformedOutput(f"a chip without its board: {line[:_LONGEST]!r}")
            sizes = [int(size) for size in _USED_OF.findall(chip[2])]
            found.append(Reported(name, at, max(sizes, default=0) or None, _words(version[1])))
        elif row := _NPU_NAME.fullmatch(line):
            name = _words(row[1])
    return tuple(found)


_MX_NAME = re.compile(
    r"\|?\s*\d+\s+(MetaX\s+\S+|MX\S+).*?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]).*", re.IGNORECASE
)
_MEMORY = re.compile(r"\b\d+\s*(?:MiB)?\s*/\s*(\d{1,9})\s*MiB")


def mx_smi(text: str) -> tuple[Reported, ...]:
    """`mx-smi`: a row with name and address, and one below it with the memory."""
    version = re.search(r"Driver Version:\s*([\w.\-]+)", text)
    if "mx-smi" not in text.lower():
        raise MalformedOutput("no heading of mx-smi")
    found: list[Reported] = []
    for line in _lines(text):
        if row := _MX_NAME.fullmatch(line):
            found.append(Reported(_words(row[1]), address(row[2]), None, _words(version[1]) if version else ""))
        elif found and found[-1].memory_mib is None and (memory := _MEMORY.search(line)):
            last = found[-1]
            found[-1] = Reported(last.model, last.address, int(memory[1]) or None, last.driver)
    if not found and not re.search(r"Attached GPUs\s*:\s*0|no .*device", text, re.IGNORECASE):
        raise MalformedOutput("no row with a device")
    return tuple(found)


def mthreads_gmi(text: str) -> tuple[Reported, ...]:
    """`mthreads-gmi --query --json`; the driver's version is said once, above the devices."""
    top = _object(_json(text))
    devices = top.get("GPU")
    if not isinstance(devices, list):
        raise MalformedOutput("no list named GPU")
    driver = _words(_text(top, "Driver Version"))
    return tuple(
        Reported(
            _words(_text(one, "Product Name")),
            address(_text(_inner(one, "PCI"), "Bus ID")),
            _mib(_text(_inner(one, "FB Memory Usage"), "Total")),
            driver,
        )
        for one in map(_object, devices)
    )


def cards_json(text: str) -> tuple[Reported, ...]:
    """`--showproductname --showbus --showmeminfo vram --json`: rocm-smi, and hy-smi, which is made like it."""
    top = _object(_json(text))
    found = []
    for key in sorted(top, key=lambda key: (len(key), key)):
        if re.fullmatch(r"card\d+", key):
            card = {name.lower(): value for name, value in _object(top[key]).items()}
            memory = next((name for name in card if name.startswith("vram total memory")), "")
            unit = "MiB" if "mib" in memory else "B"
            model = _text(card, "card series") or _text(card, "card model")
            size = _mib(f"{_text(card, memory)} {unit}") if memory else None
            found.append(Reported(_words(model), address(_text(card, "pci bus")), size))
    if not found:
        raise MalformedOutput("no card in the object")
    return tuple(found)


def amd_smi(text: str) -> tuple[Reported, ...]:
    """`amd-smi static --asic --bus --vram --driver --json`: a list, or an object with one."""
    top = _json(text)
    devices = top.get("gpu_data") if isinstance(top, dict) else top
    if not isinstance(devices, list):
        raise MalformedOutput("no list of devices")
    found = []
    for one in map(_object, devices):
        size, driver = _inner(_inner(one, "vram"), "size"), _inner(one, "driver")
        found.append(
            Reported(
                _words(_text(_inner(one, "asic"), "market_name")),
                address(_text(_inner(one, "bus"), "bdf")),
                _mib(f"{_text(size, 'value')} {_text(size, 'unit')}"),
                _words(_text(driver, "version") or _text(driver, "driver_version")),
            )
        )
    return tuple(found)


def xpu_smi(text: str) -> tuple[Reported, ...]:
    """`xpu-smi discovery -j`."""
    devices = _object(_json(text)).get("device_list")
    if not isinstance(devices, list):
        raise MalformedOutput("no list named device_list")
    return tuple(
        Reported(_words(_text(one, "device_name")), address(_text(one, "pci_bdf_address")))
        for one in map(_object, devices)
    )


def efsmi(text: str) -> tuple[Reported, ...]:
    """`efsmi -q`: a block a device, of lines `key : value`."""
    if "Enflame System Management Interface" not in text:
        raise MalformedOutput("no heading of efsmi")
    _, *blocks = re.split(r"^\s*DEV ID\s+\d+\s*$", text, flags=re.MULTILINE)
    found = []
    for block in blocks:
        said: dict[str, str] = {}
        for line in block.splitlines():
            key, colon, value = line.partition(":")
            if colon:
                said.setdefault(key.strip(), value.strip())
        parts = [said.get(key, "") for key in ("Domain", "Bus", "Dev", "Func")]
        at = address("{}:{}:{}.{}".format(*parts))
        memory = _mib(said.get("Total Size") or said.get("Mem Size", ""))
        found.append(Reported(_words(said.get("Dev Name", "")), at, memory, _words(said.get("Ver", ""))))
    return tuple(found)


_MLU_NAME = re.compile(r"\|\s*\d+\s+\S+\s+(MLU\S+)\s[^|]*\|\s*([0-9a-f:.]+)\s*\|.*", re.IGNORECASE)


def cnmon(text: str) -> tuple[Reported, ...]:
    """`cnmon`: a row with name and address, and one below it with the memory."""
    version = re.search(r"Driver\s+v?(\S+)", text)
    if "CNMON" not in text or version is None:
        raise MalformedOutput("no heading of cnmon with the driver's version")
    found: list[Reported] = []
    for line in _lines(text):
        if row := _MLU_NAME.fullmatch(line):
            found.append(Reported(_words(row[1]), address(row[2]), None, _words(version[1])))
        elif found and found[-1].memory_mib is None and (memory := _MEMORY.search(line)):
            last = found[-1]
            found[-1] = Reported(last.model, last.address, int(memory[1]) or None, last.driver)
    return tuple(found)


def address(text: str) -> str:
    """A PCI address as sysfs writes it, or "" where the text has none: `00000000:2A:00.0` is `0000:2a:00.0`."""
    match = _ADDRESS.match(text.strip())
    return f"{match[1] or '0000'}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if line.strip())


def _words(text: str) -> str:
    """What a tool says goes to terminals and JSON: one printable line, not too long, "" for its words for none."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())[:_LONGEST]
    return "" if words.lower() in _NOTHING else words


def _mib(text: str) -> int | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    unit = (match[2] or "").upper().replace("I", "")
    return int(int(match[1]) * _MIB[unit]) or None


def _json(text: str) -> Any:
    start = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=-1)
    if start < 0:
        raise MalformedOutput("no JSON")
    try:
        return json.loads(text[start:])
    except (ValueError, RecursionError) as exc:
        raise MalformedOutput(f"not JSON: {exc}") from exc


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedOutput("no object where one belongs")
    return value


def _inner(value: dict[str, Any], key: str) -> dict[str, Any]:
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}


def _text(value: dict[str, Any], key: str) -> str:
    text = value.get(key)
    return str(text) if isinstance(text, (str, int, float)) and not isinstance(text, bool) else ""

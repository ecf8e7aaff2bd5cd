"""What the processor says of itself: its name, and the instruction sets that engines choose their cache by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from deeplink.chips.tree import read

LONGEST = 1 << 14
X86 = ("sse4_2", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx_vnni", "avx512_vnni")
AMX = ("amx_tile", "amx_bf16", "amx_int8", "amx_fp16")
ARM = ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme")


@dataclass(frozen=True, slots=True)
class Cpu:
    """`family` is x86, arm, or "" where /proc/cpuinfo has no flags that are known. `cores` are logical ones."""

    family: str
    vendor: str
    model: str
    cores: int
    isa: tuple[str, ...]
    amx: tuple[str, ...]

    def has(self, needed: tuple[str, ...]) -> bool:
        return set(needed) <= {self.family, *self.isa, *self.amx}


def cpu(root: Path) -> Cpu:
    """Only the first processors are read: for each one more the kernel may ask that core for its clock."""
    try:
        with open(root / "proc/cpuinfo", "rb") as file:
            text = file.read(LONGEST).decode(errors="replace")
    except OSError:
        text = ""
    return parse(text, read(root / "sys/devices/system/cpu/online"))


def parse(text: str, online: str = "") -> Cpu:
    """`text` is (the beginning of) /proc/cpuinfo; `online` lists the logical cores, as in `0-3,8`."""
    first: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            first.setdefault(key.strip(), " ".join("".join(c for c in value if c.isprintable()).split()))
    x86, arm = set(first.get("flags", "").split()), set(first.get("Features", "").split())
    family, known, flags = ("x86", X86, x86) if x86 else ("arm", ARM, arm) if arm else ("", (), set())
    return Cpu(
        family,
        (first.get("vendor_id") or first.get("CPU implementer", ""))[:80],
        (first.get("model name") or first.get("CPU part", ""))[:80],
        _count(online) or len(re.findall(r"^processor\s*:", text, re.MULTILINE)),
        tuple(flag for flag in known if flag in flags),
        tuple(flag for flag in AMX if flag in x86),
    )


def _count(online: str) -> int:
    total = 0
    for part in online.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            return 0
        total += max(0, int(match[2] or match[1]) - int(match[1]) + 1)
    return total

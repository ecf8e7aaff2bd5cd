"""A host's device tree, made for a test: files under a folder as the kernel shows them, and tools that answer.

Hand-made. What is in it of a real host are the numbers and names that `deeplink.chips.sources` has sources for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deeplink.chips.tool import Answer


@dataclass
class Host:
    """`run` is a runner: it answers with `tools`, by the program's name, and keeps in `asked` what it was asked."""

    root: Path
    tools: dict[str, str | Answer] = field(default_factory=dict)
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def file(self, path: str, text: str = "") -> None:
        at = self.root / path.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)

    def pci(self, address: str, number: str, kind: str = "120000", driver: str = "", render: int | None = None) -> None:
        """A function on the bus; `number` is `vendor:device`."""
        vendor, device = number.split(":")
        folder = f"sys/bus/pci/devices/{address}"
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            self.file(f"{folder}/{name}", f"0x{value}\n")
        if driver:
            (self.root / folder / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        if render is not None:
            (self.root / folder / f"drm/renderD{render}").mkdir(parents=True)
            (self.root / folder / "drm/card0").mkdir(parents=True)

    def bus(self) -> None:
        """A PCI tree with what every host has: none of it is a chip."""
        self.pci("0000:00:00.0", "8086:09a2", "088000")
        self.pci("0000:00:01.0", "1022:1480", "060000")
        self.pci("0000:02:00.0", "1a03:2000", "030000", "ast")
        self.pci("0000:03:00.0", "15b3:101b", "020000", "mlx5_core")
        self.pci("0000:04:00.0", "1ded:107f", "020000")  # Alibaba's network card
        self.pci("0000:05:00.0", "19e5:1711", "030000", "hibmc-drm")  # Huawei's management chip has a screen
        self.pci("0000:06:00.0", "10de:22a3", "068000", "nvidia-nvswitch")
        self.pci("0000:07:00.1", "10de:22e8", "040300", "snd_hda_intel")

    def nodes(self, *paths: str) -> None:
        for path in paths:
            self.file(path)

    def run(self, command: Sequence[str], seconds: float, elsewhere: Sequence[str] = ()) -> Answer:
        self.asked.append(tuple(command))
        said = self.tools.get(command[0])
        if said is None:
            return Answer("absent", detail=f"{command[0]} is not installed")
        return Answer("answered", said) if isinstance(said, str) else said

"""What is known of a chip, as data. A value nobody has published, or that sources disagree on, is None: no guesses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Confidence = Literal["vendor", "vendor, by press", "paper, by press", "press", "measured", "secondary", "read"]
"""`read` was read from code or a data file; `secondary` was only found where somebody else repeats it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where facts were read. The licence is that of what they were read from, and goes with every copy of them."""

    name: str
    where: str
    licence: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, in the unit its field is named after, and who says so."""

    value: float
    source: Source
    confidence: Confidence
    note: str = ""


@dataclass(frozen=True, slots=True)
class Named:
    """A name that others gave something, and who says so."""

    value: str
    source: Source


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one chip as the vendor counts them. TFLOPS and TOPS are dense; GB and GB/s are 10^9 bytes. `measured_*` is
    what a benchmark reached, which is what may be planned with where it is known."""

    bf16_tflops: Figure | None = None
    int8_tops: Figure | None = None
    fp8_tflops: Figure | None = None
    memory_gb: Figure | None = None
    memory_gbs: Figure | None = None
    measured_bf16_tflops: Figure | None = None
    measured_int8_tops: Figure | None = None
    measured_memory_gbs: Figure | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """Chip to chip within a machine, or chip to host. `counted` says what the figure adds up: one direction, or all."""

    name: str
    source: Source
    gbs: Figure | None = None
    counted: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """How one engine runs on the chip. `plugin` is the package beside the engine, or "" where the engine itself does.

    `layouts` are names in kvconnector's catalogue of cache layouts, the usual first; None is not known, or not in the
    catalogue (`note` says which). `block_sizes` are in tokens, the default first; `dtypes` those of the cache. `image`
    is a container image that has it, without a tag where it is not known which is for the chip.
    """

    engine: str
    plugin: str
    had: str
    source: Source
    layouts: tuple[str, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    note: str = ""
    image: Named | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    """One device as a vendor's tool lists it. `address` is as in sysfs (`0000:c1:00.0`), or "" where it is not said."""

    model: str
    address: str = ""
    memory_mib: int | None = None
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A vendor's command that lists devices. `elsewhere` are folders it is in when it is not on the path. `read` raises
    MalformedOutput for what it does not understand, and nothing else."""

    command: tuple[str, ...]
    read: Callable[[str], tuple[Reported, ...]]
    source: Source
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Vendor:
    """How a vendor's devices show on a host. Equal in all profiles of that vendor.

    `classes` are beginnings of the PCI class: a vendor may make network cards and display controllers too. `nodes` is
    a regular expression for the whole path of a node that stands for one device; with `drm` those are the render nodes
    that sysfs has beside the function on the bus, as other vendors' are named alike. `control` nodes are there once,
    with the driver. `resource` is what its Kubernetes device plugin calls one whole device, and `visible` the
    environment variable by which a process is told the numbers of its devices. `version_files` hold a driver's
    version, beside `/sys/module/<driver>/version` of `drivers` and of what is bound: a path, and a pattern with one
    group.
    """

    name: str
    pci: tuple[int, ...]
    classes: tuple[str, ...]
    tools: tuple[Tool, ...]
    sources: tuple[Source, ...]
    nodes: str = ""
    folder: str = "dev"
    drm: bool = False
    control: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    resource: Named | None = None
    visible: Named | None = None
    version_files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Pci:
    """PCI device numbers that mean this chip, and who says so."""

    devices: tuple[int, ...]
    source: Source


@dataclass(frozen=True, slots=True)
class Profile:
    """One chip. `resource` is its own name in Kubernetes where the vendor's chips have several. `models` are regular
    expressions for the whole of what a tool calls it, whatever the case.

    `vendor` is None for a processor: those are told apart by `cpu`, the instruction sets that must all be there.
    """

    name: str
    title: str
    vendor: Vendor | None
    models: tuple[str, ...] = ()
    pci: tuple[Pci, ...] = ()
    served: tuple[Served, ...] = ()
    dtypes: tuple[str, ...] | None = None
    dtypes_source: Source | None = None
    links: tuple[Link, ...] = ()
    rates: Rates = Rates()
    cpu: tuple[str, ...] = ()
    note: str = ""
    resource: Named | None = None

    def is_model(self, model: str) -> bool:
        return any(re.fullmatch(pattern, model, re.IGNORECASE) for pattern in self.models)

    def is_device(self, device: int) -> bool:
        return any(device in pci.devices for pci in self.pci)

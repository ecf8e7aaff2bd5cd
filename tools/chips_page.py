"""Write docs/chips.md from the profiles of chips: `python tools/chips_page.py`. A test holds the page to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from deeplink.chips.catalogue import PROFILES
from deeplink.chips.profile import Figure, Named, Profile, Served, Source

PAGE = Path(__file__).parents[1] / "docs" / "chips.md"
UNKNOWN = "?"

HEAD = """\
# Chips

What deeplink knows of each chip: how it is found, which engine plugin serves it, the layout of its caches, and its
rates. Written by `tools/chips_page.py` from `deeplink/chips/catalogue/`; a value that no source was found for is `?`
here and `None` there. One more chip is one more entry, or a plugin's `deeplink_register_chips` ([hooks.md](hooks.md)).

A profile is a description, not a claim that deeplink was tried there: what works is in
[support-matrix.md](support-matrix.md).

`deeplink chips` lists what is on a host. Detection reads device nodes, the PCI numbers and drivers in sysfs, and
/proc/cpuinfo, and asks a vendor's own tool where those show its devices. It imports no vendor's runtime and starts no
device. A tool that is not there, fails, hangs or prints something unknown is a recorded reason. By itself, detection
takes less than 200 ms, of which the tools together get 120; many need longer to answer, so `deeplink chips` gives
them 2 s.
"""


def page(profiles: Iterable[Profile]) -> str:
    chips = list(profiles)
    numbers = {source: at for at, source in enumerate(_sources(chips), 1)}
    parts = [
        HEAD,
        _found(chips, numbers),
        _served(chips, numbers),
        _started(chips, numbers),
        _rates(chips, numbers),
        _notes(chips),
        _list(numbers),
    ]
    return "\n".join(parts)


def _found(chips: list[Profile], numbers: dict[Source, int]) -> str:
    rows = []
    for chip in chips:
        vendor = chip.vendor
        if vendor is None:
            rows.append((chip.title, f"`{chip.name}`", "/proc/cpuinfo: " + ", ".join(chip.cpu), "", "", ""))
            continue
        ids = "<br>".join(
            f"{vendor.pci[0]:04x}: {', '.join(f'{device:04x}' for device in pci.devices)} {_cite(numbers, pci.source)}"
            for pci in chip.pci
        )
        nodes = "render nodes of its functions" if vendor.drm else f"`{vendor.nodes}`"
        control = "".join(f", `{path}`" for path in vendor.control)
        tools = ", ".join(f"`{tool.command[0]}` {_cite(numbers, tool.source)}" for tool in vendor.tools)
        names = "<br>".join(f"`{model}`" for model in chip.models)
        cited = _cite(numbers, *vendor.sources)
        only = f"{vendor.pci[0]:04x}: {UNKNOWN}" if vendor.pci else UNKNOWN
        rows.append((chip.title, f"`{chip.name}`", ids or only, f"{nodes}{control} {cited}", tools, names))
    head = ("chip", "name", "PCI vendor: devices", "device nodes", "tool", "what the tool calls it")
    return f"## How each is found\n\n{_table(head, rows)}"


def _served(chips: list[Profile], numbers: dict[Source, int]) -> str:
    rows = []
    for served in dict.fromkeys(one for chip in chips for one in chip.served):
        who = ", ".join(chip.title for chip in chips if served in chip.served)
        layouts = UNKNOWN if served.layouts is None else "<br>".join(f"`{layout}`" for layout in served.layouts)
        rows.append(
            (who, served.engine, served.plugin or "none needed", _had(served, numbers), layouts, *_habits(served))
        )
    head = ("chip", "engine", "plugin", "had by", "cache layout", "block", "cache dtypes", "remarks")
    text = "The layouts are those of [layouts.md](layouts.md). Blocks are in tokens, the default first."
    none = ", ".join(chip.title for chip in chips if not chip.served)
    return f"## Who serves it\n\n{text} Of no engine on it is known: {none}.\n\n{_table(head, rows)}"


def _had(served: Served, numbers: dict[Source, int]) -> str:
    return f"{served.had} {_cite(numbers, served.source)}"


def _started(chips: list[Profile], numbers: dict[Source, int]) -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for chip in chips:
        vendor = chip.vendor
        images = (f"{served.engine}: {_named(served.image, numbers)}" for served in chip.served if served.image)
        resource = chip.resource or (vendor.resource if vendor else None)
        none = "none needed" if vendor is None else UNKNOWN
        cells = (
            _named(resource, numbers) if resource else none,
            _named(vendor.visible, numbers) if vendor and vendor.visible else none,
            "<br>".join(images) or UNKNOWN,
        )
        rows.setdefault(cells, []).append(chip.title)
    head = ("chips", "in Kubernetes", "which devices a process sees", "container image")
    text = """\
What `deeplink emit` writes. The images hold the engine, not deeplink; one without a tag has several, and which of
them is for the chip is to be found out."""
    return (
        f"## How it is started\n\n{text}\n\n{_table(head, [(', '.join(who), *cells) for cells, who in rows.items()])}"
    )


def _named(named: Named, numbers: dict[Source, int]) -> str:
    return f"`{named.value}` {_cite(numbers, named.source)}"


def _habits(served: Served) -> tuple[str, str, str]:
    sizes = UNKNOWN if served.block_sizes is None else ", ".join(str(size) for size in served.block_sizes)
    return sizes, UNKNOWN if served.dtypes is None else ", ".join(served.dtypes), served.note


def _rates(chips: list[Profile], numbers: dict[Source, int]) -> str:
    rows = []
    for chip in chips:
        if chip.vendor is None:
            continue
        rates = chip.rates
        figures = (
            (rates.bf16_tflops, rates.measured_bf16_tflops),
            (rates.int8_tops, rates.measured_int8_tops),
            (rates.fp8_tflops, None),
            (rates.memory_gb, None),
            (rates.memory_gbs, rates.measured_memory_gbs),
        )
        links = []
        for link in chip.links:
            speed = f": {_figure(link.gbs, numbers, ' GB/s')}" if link.gbs else ""
            counted = f", {link.counted}" if link.counted else ""
            links.append(f"{link.name}{speed}{counted}{'' if link.gbs else f' {_cite(numbers, link.source)}'}")
        dtypes = UNKNOWN
        if chip.dtypes and chip.dtypes_source:
            dtypes = f"{', '.join(chip.dtypes)} {_cite(numbers, chip.dtypes_source)}"
        cells = ("<br>".join(_both(rated, measured, numbers)) or UNKNOWN for rated, measured in figures)
        rows.append((chip.title, *cells, "<br>".join(links) or UNKNOWN, dtypes))
    head = ("chip", "BF16 TFLOPS", "INT8 TOPS", "FP8 TFLOPS", "memory GB", "memory GB/s", "links", "computes in")
    text = """\
Dense, of one chip as its vendor counts them; GB are 10^9 bytes. After each figure, how it is known and by whom:
*vendor*, *measured*, *read* (from a data file or a recorded output), *paper*, *press*, or *secondary* (only found
where somebody else repeats it)."""
    return f"## Rates\n\n{text}\n\n{_table(head, rows)}"


def _both(rated: Figure | None, measured: Figure | None, numbers: dict[Source, int]) -> Iterator[str]:
    if rated:
        yield _figure(rated, numbers)
    if measured:
        yield f"reached: {_figure(measured, numbers)}"


def _figure(figure: Figure, numbers: dict[Source, int], unit: str = "") -> str:
    note = f"; {figure.note}" if figure.note else ""
    return f"{figure.value:g}{unit} ({figure.confidence}{note}) {_cite(numbers, figure.source)}"


def _notes(chips: list[Profile]) -> str:
    return "## Notes\n\n" + "".join(f"- **{chip.title}**: {chip.note}\n" for chip in chips if chip.note)


def _list(numbers: dict[Source, int]) -> str:
    text = """\
Facts only; no text and no code was taken. Where a licence is named, the facts were read from work under it, and it goes
with every copy of them.
"""
    lines = []
    for source, number in numbers.items():
        licence = f" ({source.licence})" if source.licence else ""
        lines.append(f"{number}. {source.name}{licence}: {source.where}\n")
    return f"## Sources\n\n{text}\n{''.join(lines)}"


def _sources(chips: list[Profile]) -> Iterator[Source]:
    found: dict[Source, None] = {}
    for chip in chips:
        if chip.vendor:
            found.update(dict.fromkeys((*chip.vendor.sources, *(tool.source for tool in chip.vendor.tools))))
        found.update(dict.fromkeys((*(pci.source for pci in chip.pci), *(served.source for served in chip.served))))
        rates = (getattr(chip.rates, name) for name in chip.rates.__slots__)
        figures = (*rates, *(link.gbs for link in chip.links))
        found.update(dict.fromkeys(link.source for link in chip.links))
        found.update(dict.fromkeys(figure.source for figure in figures if figure))
        if chip.dtypes and chip.dtypes_source:
            found[chip.dtypes_source] = None
    images = (served.image for chip in chips for served in chip.served)
    found.update(dict.fromkeys(image.source for image in images if image))
    yield from found


def _cite(numbers: dict[Source, int], *sources: Source) -> str:
    return f"[{', '.join(str(numbers[source]) for source in sources)}]"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PROFILES))

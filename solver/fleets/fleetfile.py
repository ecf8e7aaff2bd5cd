"""fleet.toml, checked once at the edge. Every complaint names the line, the field and what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deeplink.errors import DeeplinkError, FleetError
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.kvconnector.layouts.catalogue import LAYOUTS
from deeplink.kvconnector.layouts.layout import ELEMENTS
from deeplink.plugins import load_plugins
from deeplink.solver import kinds
from deeplink.solver.estimates import catalogue, model, table
from deeplink.solver.estimates.roofline import Chip, Fractions
from deeplink.solver.exact.highs import Effort
from deeplink.solver.fleets import served, spanning, tables, trace
from deeplink.solver.fleets.configure import rates_of
from deeplink.solver.fleets.fleet import (
    Bucket,
    Connection,
    Fleet,
    Inventory,
    Request,
    Service,
    Situation,
    Start,
    Workload,
)
from deeplink.solver.fleets.lines import line
from deeplink.solver.fleets.sections import (
    ChipSection,
    FleetFile,
    LinkSection,
    ModelSection,
    PoolSection,
    ScenarioSection,
    WorkloadSection,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LIMITS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
"""How pydantic calls a limit, and how a remedy does."""
_MADE = 20_000
"""Requests to verify with where there is no trace."""

Path_ = tuple[str | int, ...]


def load(path: Path) -> Fleet:
    """The fleet a file describes. Raises FleetError or RateError."""
    try:
        text = path.read_text()
        data = tomllib.loads(text)
    except OSError as exc:
        raise FleetError(f"cannot read {path}: {exc.strerror}", remedy="name a fleet file") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise FleetError(f"{path} is not TOML: {exc}", remedy="correct the line") from exc
    reader = _Reader(text, path)
    try:
        file = FleetFile.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        place = tuple("from" if part == "from_" else part for part in first["loc"])
        # What is missing has no value: pydantic gives what it is missing from.
        value = "" if first["type"] == "missing" else repr(first["input"])[:200]
        raise reader.wrong(place, first["msg"], value, _remedy(first["type"], first.get("ctx", {}))) from exc
    return reader.fleet(file)


def _remedy(kind: str, context: Mapping[str, Any]) -> str:
    """What to do about what pydantic calls `kind`."""
    if kind == "missing":
        return "add it; docs/solver.md says what it means"
    if kind == "extra_forbidden":
        return "correct its name, or remove it; docs/solver.md lists all keys"
    if kind == "literal_error":
        return f"use one of {context['expected']}"
    for name, words in _LIMITS.items():
        if name in context:
            return f"give {words} {context[name]}"
    return "docs/solver.md says what it may be"


class _Reader:
    """Knows the file, so that what is wrong with it can be found in it."""

    def __init__(self, text: str, path: Path) -> None:
        self.text = text
        self.path = path
        self.config: dict[str, Any] = {}

    def wrong(self, place: Path_, message: str, value: str, remedy: str) -> FleetError:
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
        at = line(self.text, place)
        where = f"{self.path.name}:{at}" if at else self.path.name
        return FleetError(f"{where}: {message}", field=name, ours=value, remedy=remedy, line=at)

    def fleet(self, file: FleetFile) -> Fleet:
        shape = self._model(file.model)
        chips, fractions = self._chips(file.chips)
        names = self._unique("pools", [pool.name for pool in file.pools])
        load, burst, requests = self._workload(file.workload)
        verify = requests or (tuple(trace.made(load, _MADE)) if file.solve.verify else ())
        profiles = self._profiles(file.chips)
        pools = tuple(
            self._pool(index, pool, chips, fractions, shape, profiles) for index, pool in enumerate(file.pools)
        )
        chosen = {pool.chip.name: pool.chip for pool in pools}
        measurements = tables.read(file.rates, shape.name, chosen, self.config, self._near, self.wrong)
        known = {pool.chip.name: pool.chip for pool in pools}
        kept, rejected = table.possible(
            (row for row in measurements if row.chip in known and row.model == shape.name),
            {shape.name: shape},
            known,
            shape.element,
        )
        if rejected:
            raise rejected[0]
        fleet = Fleet(
            name=file.name or self.path.stem,
            checkpoint=file.model.checkpoint,
            model=shape,
            pools=pools,
            workload=load,
            service=Service(**file.service.model_dump()),
            objective=file.objective,
            connections=tuple(self._links(file.links, names)),
            situations=tuple(self._scenarios(file.scenarios, names, burst)),
            budget=file.budget,
            link_share=file.solve.link_share,
            effort=Effort(file.solve.gap, file.solve.seconds),
            measurements=tuple(kept),
            sensitivity=file.solve.sensitivity,
            replay=requests,
            verify=verify if file.solve.verify else (),
        )
        for index, pool in enumerate(pools):
            self._require_possible(fleet, index, pool)
            self._require_measured(fleet, index, pool)
        return fleet

    def _require_possible(self, fleet: Fleet, index: int, pool: Inventory) -> None:
        profile = kinds.profile_of(pool.chip.name, pool.start.profile, load_plugins().chips.items)
        found = served.objection(pool, fleet.model, profile)
        if found is not None:
            raise self.wrong(("pools", index, found.key), found.why, found.value, found.remedy)

    def _require_measured(self, fleet: Fleet, index: int, pool: Inventory) -> None:
        for size in pool.tp:
            hosts = spanning.hosts(pool, size)
            if hosts > 1 and not spanning.roles(pool, size, rates_of(fleet, pool, size)):
                raise self.wrong(
                    ("pools", index, "tp"),
                    f"a group of {size} spans {hosts} hosts of {pool.per_host} chips, and how fast it is then is not "
                    "known: [[rates]] have fewer than three points of it",
                    str(size),
                    f"measure such an engine (deeplink measure --tp {size}), or use sizes up to {pool.per_host}; where "
                    "a host has more chips, say so as per_host",
                )

    def _unique(self, section: str, names: list[str]) -> list[str]:
        for index, name in enumerate(names):
            if name in names[:index]:
                raise self.wrong((section, index, "name"), f"{name!r} is there twice", name, "give each its own name")
        return names

    def _near(self, path: Path) -> Path:
        return self.path.parent / path

    def _model(self, section: ModelSection) -> model.Model:
        place = ("model", "config")
        try:
            self.config = json.loads(self._near(section.config).read_text())
            return model.parse(self.config, section.name)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, RecursionError) as exc:
            raise self.wrong(
                place, f"cannot read the model's config: {exc}", str(section.config), "name config.json"
            ) from exc
        except FleetError as exc:
            raise self.wrong(place, f"{exc.message} ({exc.field})", exc.ours, exc.remedy) from exc

    def _chips(self, sections: Iterable[ChipSection]) -> tuple[dict[str, Chip], dict[str, Fractions]]:
        sections = list(sections)
        self._unique("chips", [section.name for section in sections])
        chips, fractions = {}, {}
        for section in sections:
            flops = [("16bit", section.tflops * 1e12)]
            flops += [("8bit", section.tflops_8bit * 1e12)] if section.tflops_8bit else []
            chips[section.name] = Chip(
                name=section.name,
                flops=tuple(flops),
                memory=section.memory_gb * 1e9,
                bandwidth=section.memory_gb_per_s * 1e9,
                link=section.link_gb_per_s * 1e9,
                watts=section.watts,
                source=section.source,
            )
            if section.compute is not None and section.memory is not None:
                fractions[section.name] = Fractions(
                    section.compute, section.memory, 5e-6, section.error, f"fractions of {section.source}"
                )
        return chips, fractions

    def _profiles(self, sections: Iterable[ChipSection]) -> dict[str, str]:
        known = load_plugins().chips.items
        for index, section in enumerate(sections):
            if section.profile and section.profile not in known:
                raise self.wrong(
                    ("chips", index, "profile"),
                    "no chip's profile has this name",
                    section.profile,
                    f"one of {', '.join(sorted(known))}",
                )
        return {section.name: section.profile for section in sections}

    def _pool(
        self,
        index: int,
        section: PoolSection,
        chips: Mapping[str, Chip],
        fractions: Mapping[str, Fractions],
        shape: model.Model,
        profiles: Mapping[str, str],
    ) -> Inventory:
        place: Path_ = ("pools", index)
        try:
            chip = chips.get(section.chip) or catalogue.chip(section.chip)
        except FleetError as exc:
            raise self.wrong((*place, "chip"), exc.message, section.chip, exc.remedy) from exc
        usual = (2**power for power in range(4))
        most = min(section.per_host, section.count)
        sizes = section.tp or tuple(
            size for size in usual if size <= most and not section.per_host % size and not shape.heads % size
        )
        sizes = tuple(sorted(set(sizes)))
        for size in sizes:
            uneven = size % section.per_host if size > section.per_host else section.per_host % size
            if uneven or shape.heads % size:
                raise self.wrong(
                    (*place, "tp"),
                    f"groups of {size} do not come out even: {section.per_host} chips a host, {shape.heads} heads",
                    str(size),
                    "use sizes that divide both, or whole hosts together; where a host has more chips, say so as "
                    "per_host",
                )
        for small, large in pairwise(sizes):
            if large % small:
                raise self.wrong(
                    (*place, "tp"),
                    f"groups of {small} and {large} do not pack onto hosts without gaps",
                    str(list(sizes)),
                    "use sizes each of which divides the next",
                )
        profile = kinds.profile_of(chip.name, profiles.get(section.chip, ""), load_plugins().chips.items)
        layout = section.layout or kinds.LAYOUTS[section.engine]
        dtype = section.kv_dtype or shape.element
        if dtype not in ELEMENTS:
            raise self.wrong((*place, "kv_dtype"), "not an element type", dtype, f"one of {', '.join(ELEMENTS)}")
        return Inventory(
            name=section.name,
            chip=chip,
            count=section.count,
            per_host=section.per_host,
            price=section.price,
            watts=chip.watts if section.watts is None else section.watts,
            roles=section.roles,
            tp=sizes,
            dtype=dtype,
            layout=LAYOUTS.get(layout, layout),
            casts=section.casts,
            utilisation=section.memory_share,
            fractions=fractions.get(section.chip) or catalogue.fractions(chip),
            engine=section.engine,
            processor=profile is not None and profile.vendor is None,
            current=tuple((entry.role, entry.tp, entry.engines) for entry in section.current),
            contract=self._contract((*place, "contract"), section.contract),
            start=Start(
                profile=profiles.get(section.chip, ""),
                flags=section.flags,
                variables=tuple(sorted(section.env.items())),
                image=section.image,
            ),
        )

    def _contract(self, place: Path_, path: Path | None) -> contracts.Contract | None:
        if path is None:
            return None
        try:
            data = self._near(path).read_bytes()
            return contracts.from_json(data) if data.lstrip()[:1] == b"{" else contracts.decode(data)
        except (OSError, DeeplinkError) as exc:
            raise self.wrong(
                place, f"cannot read the contract: {exc}", str(path), "deeplink contract show --json"
            ) from exc

    def _links(self, sections: Iterable[LinkSection], names: list[str]) -> Iterable[Connection]:
        seen: dict[tuple[str, str], int] = {}
        for index, section in enumerate(sections):
            for key, name in (("from", section.from_), ("to", section.to)):
                if name not in names:
                    raise self.wrong(("links", index, key), "no pool has this name", name, f"one of {', '.join(names)}")
            ends = [(section.from_, section.to)]
            if section.both and section.from_ != section.to:
                ends.append((section.to, section.from_))
            for pair in ends:
                if pair in seen:
                    raise self.wrong(
                        ("links", index),
                        f"the link from {pair[0]} to {pair[1]} is also that of links[{seen[pair]}]",
                        f"{section.gb_per_s:g} GB/s",
                        "state each direction once",
                    )
                seen[pair] = index
                rate = section.gb_per_s * 1e9 / (2 if section.convention == "both-ways" else 1)
                yield Connection(*pair, rate, section.latency_ms / 1e3, section.per)

    def _workload(self, section: WorkloadSection) -> tuple[Workload, float, tuple[Request, ...]]:
        if bool(section.lengths) == (section.trace is not None):
            raise self.wrong(
                ("workload",), "a workload has either lengths or a trace", "", "give one of them, not both"
            )
        if section.trace is not None:
            requests = trace.read(self._near(section.trace))
            load = trace.workload(
                requests, buckets=section.buckets, hits=section.prefix_hits, source=section.trace.name
            )
            over = {key: value for key in ("rate", "burstiness") if (value := getattr(section, key)) is not None}
            if over.get("rate"):
                requests = trace.scaled(requests, over["rate"] / load.rate)
            hits = section.prefix_hits
            requests = [replace(r, cached=round(hits * r.prompt)) for r in requests] if hits else requests
            return replace(load, **over), trace.burst(requests), tuple(requests)
        if section.rate is None:
            raise self.wrong(("workload", "rate"), "a workload without a trace has a rate", "", "requests a second")
        total = sum(entry.share for entry in section.lengths)
        buckets = tuple(
            Bucket(
                f"{entry.prompt:g}/{entry.output:g}",
                entry.prompt,
                entry.output,
                entry.share / total,
                entry.prompt * section.prefix_hits,
            )
            for entry in section.lengths
        )
        load = Workload(section.rate, 1.0 if section.burstiness is None else section.burstiness, buckets)
        return load, 0.0, ()

    def _scenarios(self, sections: Iterable[ScenarioSection], names: list[str], burst: float) -> Iterable[Situation]:
        sections = list(sections)
        self._unique("scenarios", [section.name for section in sections])
        for index, section in enumerate(sections):
            for pool in section.lost:
                if pool not in names:
                    raise self.wrong(
                        ("scenarios", index, "lost"), "no pool has this name", pool, f"one of {', '.join(names)}"
                    )
            rate = section.rate
            if rate == "burst":
                if not burst:
                    raise self.wrong(
                        ("scenarios", index, "rate"), "only a trace tells how high a burst is", "burst", "give a number"
                    )
                rate = burst
            yield Situation(section.name, float(rate), tuple(sorted(section.lost.items())))

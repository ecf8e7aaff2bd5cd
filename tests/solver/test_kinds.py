"""Pools of engines of each kind: what of them is planned, what is refused and where, and with whose times."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from described import CONFIG, FLEET, write

from deeplink.errors import FleetError, RateError, SolverError
from deeplink.kvconnector.contracts import contract as contracts
from deeplink.solver import kinds
from deeplink.solver import placement as doc
from deeplink.solver.estimates import catalogue, roofline, table
from deeplink.solver.estimates.rates import Measurement
from deeplink.solver.estimates.roofline import Fractions, Step
from deeplink.solver.exact.problem import Role
from deeplink.solver.fleets import fleetfile, served
from deeplink.solver.fleets.candidates import formulate
from deeplink.solver.fleets.configure import rates_of
from deeplink.solver.fleets.fleet import Inventory
from deeplink.solver.kinds import KINDS, Kind
from deeplink.solver.place import place

H20 = 'chip = "NVIDIA H20"'
PROCESSOR = """
[[chips]]
name = "threads"
profile = "cpu-x86"
tflops = 100
memory_gb = 900
memory_gb_per_s = 3000
source = "more than there can be"
"""


def of(kind: str, more: str = "") -> str:
    """The fleet with the pool h20 of this kind."""
    return FLEET.replace(H20, f'{H20}\nengine = "{kind}"\n{more}')


def on_processors(kind: str, *, tp: str = "[1]", more: str = "") -> str:
    """The fleet with the pool h20 of this kind, on processors."""
    text = of(kind, more).replace(H20, 'chip = "threads"')
    head, _, tail = text.partition('name = "h20"')
    return f'{head}name = "h20"{tail.replace("tp = [2]", f"tp = {tp}", 1)}{PROCESSOR}'


def planned(text: str, folder: Path) -> tuple[set[tuple[str, int]], tuple[str, ...]]:
    """The roles and sizes of the pool h20 that there are candidates of, and what was left out."""
    formulation = formulate(fleetfile.load(write(folder, text)))
    setups = [one for one in formulation.setups.values() if one.pool == "h20"]
    return {(one.role, one.tp) for one in setups}, formulation.skipped


def test_a_pool_is_of_vllm_unless_it_says_otherwise(tmp_path: Path) -> None:
    fleet = fleetfile.load(write(tmp_path))
    assert {pool.engine for pool in fleet.pools} == {"vllm"}
    assert place(fleet) == place(fleetfile.load(write(tmp_path, of("vllm"))))


@pytest.mark.parametrize("kind", ["sglang", "lmdeploy"])
def test_on_accelerators_they_serve_alone_and_why_is_said(tmp_path: Path, kind: str) -> None:
    found, skipped = planned(of(kind), tmp_path)
    assert found == {("both", 2)}
    lines = [line for line in skipped if line.startswith("h20: ")]
    assert len(lines) == 2
    assert all("(device: the chip's memory, where it would have to be host memory)" in line for line in lines)
    assert ["prefill" in line for line in lines] == [True, False]


@pytest.mark.parametrize("kind", ["sglang", "lmdeploy"])
def test_on_processors_they_hand_over_in_groups_of_one(tmp_path: Path, kind: str) -> None:
    found, skipped = planned(on_processors(kind, tp="[1, 2]"), tmp_path)
    assert found == {("prefill", 1), ("decode", 1), ("both", 1)}
    assert (
        len([line for line in skipped if "on 2 chips" in line and "(tp: 2, where it would have to be 1)" in line]) == 3
    )


def test_vllm_is_planned_as_before(tmp_path: Path) -> None:
    found, skipped = planned(on_processors("vllm", tp="[1, 2]"), tmp_path)
    assert found == {(role, tp) for role in ("prefill", "decode", "both") for tp in (1, 2)}
    assert skipped == ()


@pytest.mark.parametrize(
    ("kind", "dtype", "planned_"),
    [("sglang", "float8_e4m3fn", {"both"}), ("sglang", "float32", {"prefill", "decode", "both"})],
)
def test_elements_that_are_kept_but_not_handed_over(tmp_path: Path, kind: str, dtype: str, planned_: set[str]) -> None:
    found, skipped = planned(on_processors(kind, more=f'kv_dtype = "{dtype}"'), tmp_path)
    assert {role for role, _ in found} == planned_
    assert any("kv_dtype" in line for line in skipped) == (len(planned_) == 1)


def on(profile: str, kind: str) -> str:
    """The fleet with the pool h20 of this kind, on chips that have this profile."""
    described = PROCESSOR.replace("threads", "mine").replace("cpu-x86", profile)
    return of(kind).replace(H20, 'chip = "mine"') + described


WIDE = of("sglang").replace("tp = [2]\n\n[[links]]", "tp = [8, 16]\n\n[[links]]").replace("count = 8", "count = 16")
WRONG = [
    (of("llamacpp"), "engine", "vllm"),
    (of("lmdeploy", 'kv_dtype = "float8_e4m3fn"'), "kv_dtype", "bfloat16, float16"),
    (of("sglang", 'kv_dtype = "int8"'), "kv_dtype", "float32"),
    (of("sglang", 'roles = ["prefill", "decode"]'), "roles", "another engine"),
    (of("lmdeploy", 'roles = ["decode"]'), "roles", "another engine"),
    (on_processors("sglang", tp="[2]"), "roles", "another engine"),
    (WIDE, "tp", "8"),
    (on("metax-c550", "sglang"), "engine", "vllm, lmdeploy"),
    (on("amd-mi300x", "lmdeploy"), "engine", "vllm, sglang"),
]


@pytest.mark.parametrize(("text", "key", "remedy"), WRONG, ids=range(len(WRONG)))
def test_what_the_engine_would_refuse_is_refused_at_its_line(tmp_path: Path, text: str, key: str, remedy: str) -> None:
    with pytest.raises(FleetError) as caught:
        fleetfile.load(write(tmp_path, text))
    error = caught.value
    assert error.field == f"pools[1].{key}"
    assert remedy in error.remedy
    assert f"fleet.toml:{error.line}:" in error.message
    # What was not written down is at the line where the pool begins.
    assert text.splitlines()[error.line - 1].partition(" =")[0] in (key, "[[pools]]")


def test_a_contract_is_of_the_pools_engine(tmp_path: Path) -> None:
    fleet = fleetfile.load(write(tmp_path))
    found = contracts.Contract("sglang", "0.5.23", "", "both", "e", contracts.Model("m", 1, 1, "", "", ""), (), (), ())
    pool = replace(fleet.pools[0], contract=found)
    objection = served.objection(pool, fleet.model, None)
    assert objection is not None
    assert (objection.key, objection.value) == ("contract", "sglang")
    assert served.objection(replace(pool, engine="sglang"), fleet.model, None) is None


@pytest.mark.parametrize("kind", ["sglang", "lmdeploy"])
@pytest.mark.parametrize(("change", "field"), [({"replicated": True}, "kind of KV cache"), ({"window": 512}, "window")])
def test_caches_that_are_more_than_k_and_v_of_all_tokens(
    tmp_path: Path, kind: Kind, change: dict[str, object], field: str
) -> None:
    fleet = fleetfile.load(write(tmp_path))
    model = replace(fleet.model, **change)  # type: ignore[arg-type]
    pool = replace(fleet.pools[1], engine=kind, processor=True)
    found = served.obstacle(pool, model, "decode", 1)
    assert found is not None
    assert found.field == field
    assert served.obstacle(pool, model, "both", 1) is None
    assert served.obstacle(replace(pool, engine="vllm", processor=False), model, "decode", 1) is None


def test_a_chip_without_a_profile_may_have_any_engine(tmp_path: Path) -> None:
    chip = '[[chips]]\nname = "mine"\ntflops = 300\nmemory_gb = 96\nmemory_gb_per_s = 4000\nsource = "me"\n'
    for kind in KINDS:
        found, _ = planned(of(kind).replace(H20, 'chip = "mine"') + chip, tmp_path)
        assert ("both", 2) in found


def test_the_layout_is_the_engines_unless_it_is_named(tmp_path: Path) -> None:
    def layout(text: str) -> str:
        return fleetfile.load(write(tmp_path, text)).pools[1].layout

    assert len({layout(of(kind)) for kind in KINDS}) >= 2
    assert layout(of("sglang", 'layout = "vllm-nhd"')) == layout(FLEET)


def test_documents_of_vllm_alone_are_of_the_first_version(tmp_path: Path) -> None:
    plain = place(fleetfile.load(write(tmp_path)))
    assert plain.version == 1
    assert b'"engine":' not in doc.encode(plain)
    found = place(fleetfile.load(write(tmp_path, on_processors("sglang"))))
    of_kind = {engine.pool: engine.kind for engine in found.engines}
    assert (found.version, of_kind.get("h20")) == (2, "sglang")
    assert doc.decode(doc.encode(found)) == found
    assert doc.decode_toml(doc.encode_toml(found)) == found
    as_first = doc.encode(found).replace(b'"version": 2', b'"version": 1')
    with pytest.raises(SolverError, match="names engines as only 2 does"):
        doc.decode(as_first)
    with pytest.raises(SolverError, match="of a version that this release reads"):
        doc.decode(doc.encode(found).replace(b'"version": 2', b'"version": 3'))
    with pytest.raises(SolverError, match="not a placement"):
        doc.decode(doc.encode(found).replace(b'"sglang"', b'"llamacpp"'))


def test_the_same_bytes(tmp_path: Path) -> None:
    text = on_processors("lmdeploy")
    first, second = (doc.encode(place(fleetfile.load(write(tmp_path, text)))) for _ in range(2))
    assert first == second


def rows(folder: Path, engine: str, reached: float) -> list[Measurement]:
    """Times of an H20 pair, by which it reaches that part of its peaks."""
    shape = fleetfile.load(write(folder)).model
    chip = catalogue.chip("NVIDIA H20")
    fractions = Fractions(reached, reached, 0.0, 0.1, "made up")
    steps = [("prefill", Step(1, tokens)) for tokens in (500, 1000, 2000, 4000)]
    steps += [("decode", Step(requests, 1, context)) for requests in (1, 16, 64) for context in (500, 2000)]
    return [
        Measurement(
            chip=chip.name,
            model="Qwen3-32B",
            tp=2,
            phase=phase,  # type: ignore[arg-type]
            requests=int(step.requests),
            tokens=int(step.tokens),
            context=step.context,
            seconds=roofline.seconds(shape, chip, step, 2, fractions, "bfloat16"),
            source=f"test of {engine}",
            engine=engine,  # type: ignore[arg-type]
        )
        for phase, step in steps
    ]


@pytest.mark.parametrize("said", ["in the table", "in the fleet file"])
def test_times_of_one_engine_are_not_taken_for_anothers(tmp_path: Path, said: str) -> None:
    text = ""
    for engine, reached in (("vllm", 0.8), ("sglang", 0.4)):
        written = rows(tmp_path, engine, reached)
        if said == "in the fleet file":
            written = [replace(row, engine="") for row in written]
            text += f'[[rates]]\ntable = "{engine}.csv"\nengine = "{engine}"\n'
        else:
            text += f'[[rates]]\ntable = "{engine}.csv"\n'
        (tmp_path / f"{engine}.csv").write_text(table.write(written))

    def step(kind: str) -> tuple[float, str]:
        fleet = fleetfile.load(write(tmp_path, of(kind) + text))
        rate = rates_of(fleet, fleet.pools[1], 2).prefill(1500)
        return rate.seconds, rate.source

    (fast, fast_source), (slow, slow_source) = step("vllm"), step("sglang")
    assert slow > 1.5 * fast
    assert "of vllm" in fast_source
    assert "of sglang" in slow_source


def test_what_nobody_says_is_vllms_and_other_pools_are_told(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text(table.write([replace(row, engine="") for row in rows(tmp_path, "vllm", 0.8)]))
    text = '[[rates]]\ntable = "rates.csv"\n'
    fleet = fleetfile.load(write(tmp_path, of("vllm") + text))
    assert rates_of(fleet, fleet.pools[1], 2).prefill(1500).kind == "interpolated"
    assert formulate(fleet).skipped == ()
    fleet = fleetfile.load(write(tmp_path, of("sglang") + text))
    assert rates_of(fleet, fleet.pools[1], 2).prefill(1500).kind == "datasheet"
    (line,) = [line for line in formulate(fleet).skipped if "measured" in line]
    assert "only times of vllm were measured, which are not those of sglang" in line


def test_a_table_and_a_fleet_file_that_contradict_each_other(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text(table.write(rows(tmp_path, "sglang", 0.5)))
    with pytest.raises(FleetError, match="the table says that line 2 is of sglang") as caught:
        fleetfile.load(write(tmp_path, FLEET + '[[rates]]\ntable = "rates.csv"\nengine = "vllm"\n'))
    assert caught.value.field == "rates[0].engine"


def test_tables_say_the_engine_only_where_there_is_one(tmp_path: Path) -> None:
    written = rows(tmp_path, "sglang", 0.5)
    assert [row.engine for row in table.parse(table.write(written), "t")] == ["sglang"] * len(written)
    silent = table.write([replace(row, engine="") for row in written])
    assert silent.splitlines()[0].split(",") == list(table.COLUMNS)
    mixed = table.write([replace(written[0], engine=""), *written[1:]])
    assert [row.engine for row in table.parse(mixed, "t")] == ["", *["sglang"] * (len(written) - 1)]
    with pytest.raises(RateError, match="line 2: not a usable engine"):
        list(table.parse(table.write(written).replace(",sglang", ",tgi", 1), "t"))


@pytest.mark.parametrize("kind", KINDS)
def test_larger_groups_never_become_possible(tmp_path: Path, kind: Kind) -> None:
    fleet = fleetfile.load(write(tmp_path))
    for processor in (False, True):
        pool: Inventory = replace(fleet.pools[1], engine=kind, processor=processor)
        roles: tuple[Role, ...] = ("prefill", "decode", "both")
        for role in roles:
            stopped = [served.obstacle(pool, fleet.model, role, size) is not None for size in (1, 2, 4, 8, 16)]
            assert all(after or not before for before, after in pairwise(stopped))


def test_every_kind_is_one_of_the_chips_engines() -> None:
    assert set(kinds.TITLES) == set(kinds.LAYOUTS) == set(kinds.DTYPES) == set(KINDS)
    assert json.loads(json.dumps(CONFIG)) == CONFIG
    assert msgspec.json.schema(doc.Engine)["$defs"]["Engine"]["properties"]["engine"]["enum"] == sorted(KINDS)

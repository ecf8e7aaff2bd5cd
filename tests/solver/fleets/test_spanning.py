"""Groups of chips on several hosts: planned where they were measured, and started as one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from described import FLEET, write

from deeplink.chips.catalogue import PROFILES
from deeplink.errors import FleetError, SolverError
from deeplink.local import up
from deeplink.solver import emit
from deeplink.solver.estimates import catalogue, roofline, table
from deeplink.solver.estimates.rates import Measurement, Phase
from deeplink.solver.estimates.roofline import Fractions, Step
from deeplink.solver.fleets import fleetfile, spanning
from deeplink.solver.fleets.candidates import formulate
from deeplink.solver.fleets.configure import rates_of
from deeplink.solver.place import place
from deeplink.solver.placement import Placement

LWS = json.loads((Path(__file__).parents[1] / "data" / "leaderworkerset.schema.json").read_text())
PROFILE = {profile.name: profile for profile in PROFILES}
SPREAD = FLEET.replace("tp = [2]", "tp = [8, 16]", 1).replace("count = 8", "count = 32", 1)
TABLE = SPREAD + '[[rates]]\ntable = "rates.csv"\n'


def measured(folder: Path, *phases: Phase, reached: float = 0.6, sizes: tuple[int, ...] = (16,)) -> None:
    """Times of groups on two hosts, by which they reach that part of their chips' peaks."""
    shape = fleetfile.load(write(folder, FLEET)).model
    chip = catalogue.chip("NVIDIA H100 SXM")
    steps: dict[Phase, list[Step]] = {
        "prefill": [Step(1, tokens) for tokens in (500, 1000, 2000, 4000)],
        "decode": [Step(requests, 1, context) for requests in (1, 16, 64, 256) for context in (500, 2000, 4000)],
    }
    fractions = Fractions(reached, reached, 0.0, 0.1, "made up")
    rows = [
        Measurement(
            chip=chip.name,
            model="Qwen3-32B",
            tp=size,
            phase=phase,
            requests=int(step.requests),
            tokens=int(step.tokens),
            context=step.context,
            seconds=roofline.seconds(shape, chip, step, size, fractions, "bfloat16"),
            source="made up",
        )
        for size in sizes
        for phase in phases
        for step in steps[phase]
    ]
    (folder / "rates.csv").write_text(table.write(rows))


def test_a_group_of_several_hosts_has_to_be_measured(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"group of 16 spans 2 hosts of 8 chips.*is not known") as caught:
        fleetfile.load(write(tmp_path, SPREAD))
    assert (caught.value.field, caught.value.ours) == ("pools[0].tp", "16")
    assert "deeplink measure --tp 16" in caught.value.remedy
    assert "per_host" in caught.value.remedy
    measured(tmp_path, "prefill", "decode", sizes=(8,))
    with pytest.raises(FleetError, match="is not known"):
        fleetfile.load(write(tmp_path, TABLE))
    # Where a host has so many chips it spans none.
    one_host = SPREAD.replace("count = 32", "count = 32\nper_host = 16", 1)
    assert fleetfile.load(write(tmp_path, one_host)).pools[0].tp == (8, 16)


@pytest.mark.parametrize("size", [12, 24])
def test_hosts_are_shared_evenly(tmp_path: Path, size: int) -> None:
    """12 are one and a half hosts; 24 are three, but 64 heads are not shared by 24."""
    with pytest.raises(FleetError, match="do not come out even") as caught:
        fleetfile.load(write(tmp_path, SPREAD.replace("[8, 16]", f"[{size}]")))
    assert caught.value.field == "pools[0].tp"


def test_only_in_roles_that_were_measured(tmp_path: Path) -> None:
    measured(tmp_path, "decode")
    formulation = formulate(fleetfile.load(write(tmp_path, TABLE)))
    assert {setup.role for setup in formulation.setups.values() if setup.tp == 16} == {"decode"}
    assert {setup.role for setup in formulation.setups.values() if setup.tp == 8} > {"decode"}
    assert [line for line in formulation.skipped if "16 chips" in line] == [
        "hopper: too little of prefill on 16 chips of several hosts was measured",
        "hopper: too little of both on 16 chips of several hosts was measured",
    ]


def test_every_time_of_theirs_is_from_the_table(tmp_path: Path) -> None:
    measured(tmp_path, "prefill", "decode")
    formulation = formulate(fleetfile.load(write(tmp_path, TABLE)))
    kinds = {rate.kind for setup in formulation.setups.values() if setup.tp == 16 for rate in setup.rates}
    assert kinds <= {"measured", "interpolated"}


def test_what_several_hosts_reach_says_nothing_about_one(tmp_path: Path) -> None:
    measured(tmp_path, "prefill", "decode")
    fleet = fleetfile.load(write(tmp_path, TABLE))
    pool = fleet.pools[0]
    assert rates_of(fleet, pool, 8).prefill(2000) == rates_of(replace(fleet, measurements=()), pool, 8).prefill(2000)
    measured(tmp_path, "prefill", "decode", sizes=(4,))
    fleet = fleetfile.load(write(tmp_path, TABLE.replace("[8, 16]", "[8]")))
    assert rates_of(fleet, pool, 8).prefill(2000) != rates_of(replace(fleet, measurements=()), pool, 8).prefill(2000)


@pytest.mark.parametrize(("count", "engines"), [(16, 1), (20, 1), (31, 1), (32, 2), (40, 2)])
def test_they_take_whole_hosts(tmp_path: Path, count: int, engines: int) -> None:
    measured(tmp_path, "prefill", "decode")
    text = TABLE.replace("count = 32", f"count = {count}").replace("[8, 16]", "[16]").replace('"cost"', '"throughput"')
    start, end = text.index('[[pools]]\nname = "h20"'), text.index("[[rates]]")
    fleet = fleetfile.load(write(tmp_path, text[:start] + text[end:]))
    assert spanning.usable(fleet.pools[0], 16) == 16 * engines
    found = place(fleet)
    assert sum(engine.count for engine in found.engines) == engines
    assert {(engine.tp, engine.hosts) for engine in found.engines} == {(16, 2)}


@pytest.fixture
def spread(tmp_path: Path) -> Placement:
    """Only several hosts are in time."""
    measured(tmp_path, "prefill", "decode", reached=0.9)
    found = place(fleetfile.load(write(tmp_path, TABLE.replace("[8, 16]", "[16]").replace("tp = [2]", "tp = [1]"))))
    assert any(engine.hosts == 2 for engine in found.engines)
    return found


def objects(placement: Placement, kind: str) -> list[dict[str, Any]]:
    text = emit.files(placement, "k8s", PROFILE)["placement.yaml"]
    return [one for one in yaml.safe_load_all(text) if one["kind"] == kind]


def test_kubernetes_takes_it(spread: Placement) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    made = objects(spread, "LeaderWorkerSet")
    assert len(made) == sum(engine.count for engine in spread.engines if engine.hosts == 2)
    assert len(objects(spread, "Deployment")) == 1 + sum(e.count for e in spread.engines if e.hosts == 1)
    for one in made:
        jsonschema.validate(one, LWS)
        template = one["spec"]["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **template[name]["metadata"]}}
            validator.validate({**pod, "spec": template[name]["spec"]}, "1.33", strict=True)
    template["sizes"] = 2
    with pytest.raises(jsonschema.ValidationError, match="sizes"):
        jsonschema.validate(one, LWS)


def test_the_leader_serves_and_workers_compute(spread: Placement) -> None:
    for one in objects(spread, "LeaderWorkerSet"):
        template = one["spec"]["leaderWorkerTemplate"]
        assert template["size"] == 2
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
        (leader,), (worker,) = (template[f"{who}Template"]["spec"]["containers"] for who in ("leader", "worker"))
        for container, rank in ((leader, "0"), (worker, "$(LWS_WORKER_INDEX)")):
            after = dict(pairwise(container["args"]))
            assert after["--tensor-parallel-size"] == "16"
            assert (after["--nnodes"], after["--node-rank"]) == ("2", rank)
            assert after["--master-addr"] == "$(LWS_LEADER_ADDRESS)"
            assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
            assert {"POD_IP", "VLLM_HOST_IP"} <= {variable["name"] for variable in container["env"]}
        unlike = set(leader["args"]) ^ set(worker["args"])
        assert unlike == {"0", "$(LWS_WORKER_INDEX)", "--headless"}
        assert "--headless" in worker["args"]
        assert {"ports", "startupProbe", "readinessProbe"} <= leader.keys()
        assert not {"ports", "startupProbe", "readinessProbe"} & worker.keys()


def test_the_service_finds_the_leader_alone(spread: Placement) -> None:
    selectors = {one["metadata"]["name"]: one["spec"]["selector"] for one in objects(spread, "Service")}
    for one in objects(spread, "LeaderWorkerSet"):
        wanted = selectors[one["metadata"]["name"]].items()
        template = one["spec"]["leaderWorkerTemplate"]
        assert wanted <= template["leaderTemplate"]["metadata"]["labels"].items()
        assert not wanted <= template["workerTemplate"]["metadata"]["labels"].items()


def test_no_two_of_its_pods_share_a_host(spread: Placement) -> None:
    for one in objects(spread, "LeaderWorkerSet"):
        template = one["spec"]["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            affinity = template[name]["spec"]["affinity"]["podAntiAffinity"]
            (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["topologyKey"] == "kubernetes.io/hostname"
            assert term["labelSelector"]["matchLabels"].items() <= template[name]["metadata"]["labels"].items()


def test_what_has_to_be_there_is_said(spread: Placement) -> None:
    text = emit.files(spread, "k8s", PROFILE)["placement.yaml"]
    assert "# Engines on several hosts are LeaderWorkerSets" in text
    own = with_chip(spread, "NVIDIA H100 SXM", image="mine:1")
    assert "# mine:1 has to have vLLM 0.32" in emit.files(own, "k8s", PROFILE)["placement.yaml"]


@pytest.mark.parametrize("format_", ["local", "compose", "ray"])
def test_one_machine_does_not_start_it(spread: Placement, format_: str) -> None:
    with pytest.raises(SolverError, match="is one engine on 2 hosts") as caught:
        emit.files(spread, format_, PROFILE)
    assert caught.value.field == "hosts"
    assert "k8s" in caught.value.remedy


def test_neither_does_up(spread: Placement) -> None:
    with pytest.raises(SolverError, match="is one engine on 2 hosts"), up.running(spread, up.Options(), print):
        pass


def with_chip(placement: Placement, chip: str, image: str = "") -> Placement:
    engines = [msgspec.structs.replace(e, chip=chip, image=image) for e in placement.engines if e.hosts > 1]
    return msgspec.structs.replace(placement, engines=tuple(engines), routes=())


@pytest.mark.parametrize("chip", ["Ascend 910B", "Hygon K100_AI", "A chip of nobody's"])
def test_an_engine_that_would_refuse_to_start_is_not_written(spread: Placement, chip: str) -> None:
    """deeplink hands over from several hosts with one version of vLLM, and which these images have is not known."""
    with pytest.raises(SolverError, match=r"vLLM 0\.32 only") as caught:
        emit.files(with_chip(spread, chip), "k8s", PROFILE)
    assert caught.value.field == "image"
    assert emit.files(with_chip(spread, chip, image="mine:1"), "k8s", PROFILE)

"""What a placement is started with, in every format, checked by what will read it."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from described import FLEET, write

from deeplink import config
from deeplink.chips.catalogue import PROFILES
from deeplink.cli.solve import write as save
from deeplink.errors import SolverError
from deeplink.plugins import load_plugins
from deeplink.solver import emit
from deeplink.solver import placement as doc
from deeplink.solver.emit import configs, images
from deeplink.solver.emit.commands import command
from deeplink.solver.emit.members import Member, members
from deeplink.solver.fleets import fleetfile
from deeplink.solver.place import place
from deeplink.solver.placement import Bucket, Placement, Route
from vllm_deeplink import flags

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KNOWN = {profile.name: profile for profile in PROFILES}


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Placement:
    return place(fleetfile.load(write(tmp_path_factory.mktemp("fleet"))))


@pytest.fixture(scope="module")
def every_chip(placement: Placement) -> Placement:
    """Engines on every chip there is a profile of, and on one that nobody knows."""
    chips = [profile.title for profile in PROFILES] + ["A chip of nobody's"]
    engines = [
        msgspec.structs.replace(
            placement.engines[0], name=f"Pool {index}/prefill", pool=f"p{index}", chip=chip, count=2
        )
        for index, chip in enumerate(chips)
    ]
    return msgspec.structs.replace(placement, engines=tuple(engines), routes=())


def all_members(placement: Placement) -> tuple[Member, ...]:
    return members(placement, KNOWN)


def commands(placement: Placement) -> list[tuple[Member, tuple[str, ...]]]:
    return [
        (member, command(placement, member, host="h", port=8000 + index, config="c.toml").words)
        for index, member in enumerate(all_members(placement))
    ]


def after(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_router_reads_its_file(placement: Placement, tmp_path: Path) -> None:
    for name, text in emit.files(placement, "local").items():
        (tmp_path / name).write_text(text)
    read = config.load(tmp_path / "deeplink.toml")
    assert len(read.engines) == sum(engine.count for engine in placement.engines)
    script = (tmp_path / "engines.sh").read_text()
    for engine in read.engines:
        assert f"--port {engine.url.rpartition(':')[2]} " in script
    for path in tmp_path.glob("*.toml"):
        config.load(path)


def test_the_script_is_one(placement: Placement, tmp_path: Path) -> None:
    for format_, name in (("local", "engines.sh"), ("ray", "start.sh")):
        script = tmp_path / name
        script.write_text(emit.files(placement, format_)[name])
        subprocess.run(["sh", "-n", str(script)], check=True, timeout=10)


def test_the_local_script_starts_from_anywhere(placement: Placement, tmp_path: Path) -> None:
    folder = tmp_path / "placement"
    save(folder, emit.files(placement, "local"))
    fake = tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    # Its last word is the engine's configuration.
    fake.write_text('#!/bin/sh\nfor last; do :; done\ncat "$last"\n')
    fake.chmod(0o755)
    path = f"{fake.parent}:{os.environ['PATH']}"
    subprocess.run([str(folder / "engines.sh")], check=True, timeout=10, cwd=tmp_path, env={**os.environ, "PATH": path})
    logs = [log.read_text() for log in folder.glob("*.log")]
    assert len(logs) == sum(engine.count for engine in placement.engines)
    assert all("[kv]" in log for log in logs)


def test_commands_say_what_was_planned(placement: Placement) -> None:
    chips: dict[str, list[str]] = {}
    for member in all_members(placement):
        made = command(placement, member, host="h", port=1, config="c.toml")
        assert shlex.split(str(made))[-len(made.words) :] == list(made.words)
        assert made.words[:3] == ("vllm", "serve", placement.model)
        assert after(made.words, "--deeplink-role") == member.engine.role
        assert after(made.words, "--tensor-parallel-size") == str(member.engine.tp)
        chips.setdefault(member.engine.pool, []).extend(dict(made.variables)["CUDA_VISIBLE_DEVICES"].split(","))
    for given in chips.values():
        assert given == [str(number) for number in range(len(given))]


def test_what_the_fleet_file_adds_comes_last(tmp_path: Path) -> None:
    text = FLEET.replace(
        'chip = "NVIDIA H20"',
        'chip = "NVIDIA H20"\nflags = ["--block-size", "128"]\nimage = "mine:1"\ncasts = ["*->float16"]',
    ).replace("price = 1.2", 'price = 1.2\nenv = {OMP_NUM_THREADS = "2"}')
    text = text.replace('name = "Qwen3-32B"', 'name = "Qwen3-32B"\ncheckpoint = "/models/qwen"')
    found = place(fleetfile.load(write(tmp_path, text)))
    for member, words in commands(found):
        assert words[2] == "/models/qwen"
        assert after(words, "--served-model-name") == "Qwen3-32B"
        if member.engine.pool == "h20":
            assert words[-2:] == ("--block-size", "128")
            assert images.image(member) == "mine:1"
            assert 'casts = ["*->float16"]' in configs.engine(member, host="h")
            assert ("OMP_NUM_THREADS", "2") in command(found, member, host="h", port=1, config="c").variables


def test_a_pool_of_a_chip_of_ones_own_may_name_a_profile(tmp_path: Path) -> None:
    chip = '[[chips]]\nname = "mine"\ntflops = 300\nmemory_gb = 96\nmemory_gb_per_s = 4000\nsource = "me"\n'
    text = FLEET.replace('chip = "NVIDIA H20"', 'chip = "mine"')
    found = place(fleetfile.load(write(tmp_path, text + chip + 'profile = "ascend-910b"\n')))
    of_mine = [member for member in all_members(found) if member.engine.pool == "h20"]
    assert {member.chip_label for member in of_mine} == {"ascend-910b"}
    with pytest.raises(Exception, match="no chip's profile has this name"):
        fleetfile.load(write(tmp_path, text + chip + 'profile = "ascend"\n'))


def test_nothing_to_start(tmp_path: Path) -> None:
    none = place(fleetfile.load(write(tmp_path, FLEET.replace("rate = 6", "rate = 6000"))))
    assert none.status == "infeasible"
    with pytest.raises(SolverError, match="nothing to start"):
        emit.files(none, "local")


def test_the_plugin_takes_its_flags(placement: Placement) -> None:
    """As vLLM's parser does with the plugin; the other flags are vLLM's own."""
    parser = argparse.ArgumentParser()
    flags._add(parser)
    for _, words in commands(placement):
        taken, rest = parser.parse_known_args(words[3:])
        assert taken.platform == "deeplink"
        assert taken.deeplink_role in ("prefill", "decode", "both")
        assert not [word for word in rest if "deeplink" in word]


def test_names_are_dns_labels_and_differ(every_chip: Placement) -> None:
    labels = [member.label for member in all_members(every_chip)]
    assert len(set(labels)) == len(labels) == 2 * len(every_chip.engines)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", label) for label in labels)
    twice = msgspec.structs.replace(
        every_chip,
        engines=tuple(
            msgspec.structs.replace(every_chip.engines[0], name=name, count=1) for name in ("a_b", "a-b", "a b")
        ),
    )
    assert len({member.label for member in all_members(twice)}) == 3


@pytest.mark.parametrize("format_", list(emit.FORMATS))
def test_the_same_bytes(every_chip: Placement, format_: str) -> None:
    assert emit.files(every_chip, format_, KNOWN) == emit.files(every_chip, format_, dict(reversed(KNOWN.items())))


def manifests(placement: Placement) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, in a tenth of the time
    return list(yaml.load_all(emit.files(placement, "k8s")["placement.yaml"], Loader=loader))


def test_kubernetes_takes_the_manifests(
    placement: Placement, every_chip: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    # It reads a schema of a megabyte for every manifest, and these have few kinds.
    monkeypatch.setattr(validator.utils, "schema_contents", functools.cache(validator.utils.schema_contents))
    for made in (placement, every_chip):
        found = manifests(made)
        assert {one["kind"] for one in found} == {"ConfigMap", "Deployment", "Service"}
        for one in found:
            validator.validate(one, "1.33", strict=True)
    deployment = next(one for one in found if one["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containerz"] = []
    with pytest.raises(validator.ValidationError):
        validator.validate(deployment, "1.33", strict=True)


def test_kubernetes_pods_ask_for_their_chips(every_chip: Placement) -> None:
    text = emit.files(every_chip, "k8s")["placement.yaml"]
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in manifests(every_chip)
        if "spec" in one and one["kind"] == "Deployment"
    }
    asked = {}
    for member in all_members(every_chip):
        pod = pods[member.label]
        assert pod["nodeSelector"] == {"deeplink/chip": member.chip_label}
        asked[member.engine.chip] = pod["containers"][0].get("resources", {}).get("limits", {})
        assert pod["containers"][0]["args"][:2] == ["vllm", "serve"]
    assert asked["NVIDIA H20"] == {"nvidia.com/gpu": "2"}
    assert asked["Ascend 910B"] == {"huawei.com/Ascend910": "2"}
    assert asked["CPU, x86"] == {}
    assert asked["A chip of nobody's"] == {}
    assert "# A chip of nobody's: what its device plugin calls it is not known" in text
    assert "# CPU, x86: what its device plugin" not in text


def test_kubernetes_configs_are_read_by_router_and_engines(placement: Placement) -> None:
    held = next(one for one in manifests(placement) if one["kind"] == "ConfigMap")["data"]
    read = config.parse(tomllib.loads(held.pop("router.toml")), "router.toml")
    assert {engine.url for engine in read.engines} == {
        f"http://{member.label}:8000" for member in all_members(placement)
    }
    for name, text in held.items():
        assert config.parse(tomllib.loads(text), name).kv.host == "POD_IP"


def test_compose_takes_the_file(placement: Placement, every_chip: Placement) -> None:
    reader = pytest.importorskip("compose_spec")
    for made in (placement, every_chip):
        text = emit.files(made, "compose")["compose.yaml"]
        read = reader.PyCompose.from_yaml(text)
        assert set(read.service_names()) == {"router", *(member.label for member in all_members(made))}
    with pytest.raises(ValueError, match=r"."):
        reader.PyCompose.from_yaml(text.replace("restart: unless-stopped", "restart: perhaps"))


def test_compose_mounts_what_is_written(every_chip: Placement) -> None:
    files = emit.files(every_chip, "compose")
    services = yaml.safe_load(files["compose.yaml"])["services"]
    for name, service in services.items():
        for mounted in service["volumes"]:
            if mounted.startswith("./"):
                assert mounted[2:].split(":")[0] in files
            if mounted.startswith("models:"):  # where its engine keeps what it downloads
                assert mounted.split(":")[1] == service["environment"]["HF_HOME"]
        assert service["build"]["dockerfile"] in files, name
    by_chip = {member.engine.chip: services[member.label] for member in all_members(every_chip) if member.chips.start}
    reserved = by_chip["NVIDIA H20"]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved[0]["device_ids"] == ["2", "3"]
    assert by_chip["Ascend 910B"]["devices"][-2:] == ["/dev/davinci2:/dev/davinci2", "/dev/davinci3:/dev/davinci3"]
    assert by_chip["Moore Threads MTT S4000"]["devices"][-2:] == ["/dev/mtgpu2:/dev/mtgpu2", "/dev/mtgpu3:/dev/mtgpu3"]
    assert by_chip["AMD Instinct MI300X"]["devices"] == ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
    assert by_chip["AMD Instinct MI300X"]["environment"]["HIP_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in by_chip["NVIDIA H20"].get("environment", {})


def test_an_unknown_image_stays_unknown_and_says_so(every_chip: Placement) -> None:
    for format_, name in (("compose", "compose.yaml"), ("k8s", "placement.yaml")):
        files = emit.files(every_chip, format_)
        assert "# Hygon K100_AI: no image with vLLM for it is known" in files[name]
        assert "ARG IMAGE\nFROM $IMAGE\n" in files["Dockerfile.hygon-k100-ai"]
        assert "ARG IMAGE=vllm/vllm-openai:v" in files["Dockerfile.nvidia-h20"]
        assert "which tag of quay.io/ascend/vllm-ascend" in files["Dockerfile.ascend-910b"]


def test_ray_asks_for_unlike_chips_by_kind(every_chip: Placement) -> None:
    files = emit.files(every_chip, "ray")
    engines = json.loads(files["ray.json"])["engines"]
    asked = {member.engine.chip: made for member, made in zip(all_members(every_chip), engines, strict=True)}
    assert asked["NVIDIA H20"]["gpus"] == 2
    assert asked["NVIDIA H20"]["resources"] == {"deeplink-nvidia-h20": 2}
    assert asked["Ascend 910B"]["resources"] == {"deeplink-ascend-910b": 2, "NPU": 2}
    assert asked["Enflame S60"]["gpus"] == 0
    assert "Enflame S60: Ray does not hand out its devices" in files["start.sh"]
    assert len({made["port"] for made in engines}) == len(engines)


def routed(placement: Placement, *flows: tuple[str, str, str, float], prompts: tuple[float, ...], longest: bool) -> Any:
    names = sorted({name for _, *pair, _ in flows for name in pair})
    engine = placement.engines[0]
    made = msgspec.structs.replace(
        placement,
        engines=tuple(msgspec.structs.replace(engine, name=name, count=1 + (name == "p")) for name in names),
        buckets=tuple(
            Bucket(f"b{index}", prompt, 10, 0, 1, prompt * 1.5 if longest else 0)
            for index, prompt in enumerate(prompts)
        ),
        routes=tuple(Route(p, d, bucket, rate, 1.0, 0.0) for bucket, p, d, rate in flows),
    )
    return configs.routes(made, all_members(made))


def test_routes_carry_the_weights(placement: Placement) -> None:
    flows = (("b0", "a", "a", 2.0), ("b1", "p", "d", 3.0), ("b1", "p", "e", 1.0))
    assert routed(placement, *flows, prompts=(100, 400), longest=False) == [
        (200, ("a",), ("a",), 1.0),
        (0, ("p-0", "p-1"), ("d",), 0.75),
        (0, ("p-0", "p-1"), ("e",), 0.25),
    ]
    assert routed(placement, *flows, prompts=(100, 400), longest=True)[0][0] == 150


def test_one_way_through_all_engines_needs_no_routes(placement: Placement) -> None:
    flows = (("b0", "p", "d", 2.0), ("b1", "p", "d", 3.0))
    assert routed(placement, *flows, prompts=(100, 400), longest=True) == []


def test_buckets_that_differ_in_their_answers_are_one_length(placement: Placement) -> None:
    flows = (("b0", "p", "d", 1.0), ("b1", "a", "a", 3.0))
    found = routed(placement, *flows, prompts=(100, 100), longest=False)
    assert [(up_to, prefill, weight) for up_to, prefill, _, weight in found] == [
        (0, ("a",), 0.75),
        (0, ("p-0", "p-1"), 0.25),
    ]


def test_placements_are_json_or_toml(placement: Placement, tmp_path: Path) -> None:
    assert doc.decode(doc.encode(placement)) == placement
    assert doc.decode_toml(doc.encode_toml(placement)) == placement
    path = tmp_path / "placement.toml"
    path.write_bytes(doc.encode_toml(placement))
    assert doc.load(path) == placement
    for wrong in (b"version = 2\n", b"version = 1\n", b"[", b"\xff"):
        path.write_bytes(wrong)
        with pytest.raises(SolverError):
            doc.load(path)
    with pytest.raises(SolverError, match="cannot read"):
        doc.load(tmp_path / "none.toml")


def test_the_profiles_of_plugins_count(placement: Placement) -> None:
    assert set(KNOWN) <= set(load_plugins().chips.items)
    own = {"own": replace(KNOWN["nvidia-h20"], name="own", title=placement.engines[0].chip)}
    assert members(placement, own)[0].chip_label == "own"

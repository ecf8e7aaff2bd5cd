"""What engines of each kind are started with, in every format."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from described import ROLES, of_kinds, write

from deeplink import config
from deeplink.chips.catalogue import PROFILES
from deeplink.cli.solve import write as save
from deeplink.config import CONTROL_OFFSET
from deeplink.errors import SolverError
from deeplink.solver import emit
from deeplink.solver.emit import configs, images
from deeplink.solver.emit.commands import command
from deeplink.solver.emit.members import Member, members
from deeplink.solver.exact.problem import Role
from deeplink.solver.fleets import fleetfile
from deeplink.solver.kinds import KINDS, TITLES, Kind
from deeplink.solver.place import place
from deeplink.solver.placement import Bucket, Placement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KNOWN = {profile.name: profile for profile in PROFILES}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Placement:
    return place(fleetfile.load(write(tmp_path_factory.mktemp("fleet"))))


@pytest.fixture(scope="module")
def mixed(split: Placement) -> Placement:
    return of_kinds(split, count=2)


@pytest.fixture(scope="module")
def everywhere(split: Placement) -> Placement:
    return of_kinds(split, ("NVIDIA H20", "Ascend 910B", "MetaX C550", "CPU, x86", "A chip of nobody's"))


def one(placement: Placement, kind: Kind, role: Role, **changes: Any) -> Member:
    found = next(m for m in members(placement, KNOWN) if (m.engine.kind, m.engine.role) == (kind, role))
    changed = msgspec.structs.replace(found.engine, count=1, **changes)
    (made,) = members(msgspec.structs.replace(placement, engines=(changed,)), KNOWN)
    return made


def words(placement: Placement, member: Member) -> list[str]:
    return list(command(placement, member, host="h", port=8000, config="c.toml").words)


def after(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_sglang_is_told_what_was_planned(mixed: Placement) -> None:
    for role in ROLES:
        member = one(mixed, "sglang", role)
        made = command(mixed, member, host="h", port=8000, config="c.toml")
        line = list(made.words)
        assert line[:3] == ["python3", "-m", "sglang.launch_server"]
        assert after(line, "--model-path") == mixed.model
        assert (after(line, "--host"), after(line, "--port")) == ("h", "8000")
        assert after(line, "--tensor-parallel-size") == str(member.engine.tp)
        assert after(line, "--dtype") == "bfloat16"
        assert ("DEEPLINK_CONFIG", "c.toml") in made.variables
        assert ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false") in made.variables
        if role == "both":
            assert not [word for word in line if "disaggregation" in word or "deeplink" in word]
            # Whole pages, of whichever size.
            assert int(after(line, "--chunked-prefill-size")) == 640
            assert "--enable-mixed-chunk" in line
        else:
            assert after(line, "--disaggregation-mode") == role
            assert after(line, "--disaggregation-transfer-backend") == "deeplink"
            assert "--chunked-prefill-size" not in line
        assert ("--max-running-requests" in line) == (role != "prefill")


def test_sglang_on_a_processor_and_with_eight_bits(mixed: Placement) -> None:
    line = words(mixed, one(mixed, "sglang", "decode", chip="CPU, x86"))
    assert (after(line, "--device"), after(line, "--attention-backend")) == ("cpu", "torch_native")
    assert after(line, "--disaggregation-decode-retraction-backup") == "cpu_tensor"
    assert "--device" not in words(mixed, one(mixed, "sglang", "decode"))
    line = words(mixed, one(mixed, "sglang", "both", kv_dtype="float8_e4m3fn"))
    assert after(line, "--kv-cache-dtype") == "fp8_e4m3"
    assert "--dtype" not in line


def test_lmdeploy_is_told_what_was_planned(mixed: Placement) -> None:
    for role in ROLES:
        member = one(mixed, "lmdeploy", role)
        made = command(mixed, member, host="h", port=8000, config="c.toml")
        line = list(made.words)
        assert line[:6] == ["python3", "-m", "deeplink.cli", "serve", "lmdeploy", mixed.model]
        assert (after(line, "--server-name"), after(line, "--server-port")) == ("h", "8000")
        assert (after(line, "--tp"), after(line, "--dtype")) == (str(member.engine.tp), "bfloat16")
        assert ("DEEPLINK_CONFIG", "c.toml") in made.variables
        if role == "both":
            assert not [word for word in line if word in ("--role", "--migration-backend")]
            assert after(line, "--max-prefill-token-num") == "700"
        else:
            assert (after(line, "--role"), after(line, "--migration-backend")) == (role.capitalize(), "deeplink")
        assert ("--max-batch-size" in line) == (role != "prefill")


@pytest.mark.parametrize(("longest", "room"), [(0.0, 8192), (8192.0, 8192), (8193.0, 16384), (100_000.0, 131072)])
def test_lmdeploy_takes_the_longest_prompt_at_once(mixed: Placement, longest: float, room: int) -> None:
    placement = msgspec.structs.replace(mixed, buckets=(Bucket("b", 100, 10, 0, 1, longest),))
    assert after(words(placement, one(placement, "lmdeploy", "prefill")), "--max-prefill-token-num") == str(room)


def test_a_checkpoint_has_the_models_name_and_the_pools_flags_come_last(mixed: Placement) -> None:
    placement = msgspec.structs.replace(mixed, checkpoint="/models/m")
    for kind in KINDS:
        flag = "--model-name" if kind == "lmdeploy" else "--served-model-name"
        line = words(placement, one(placement, kind, "both", flags=("--trust-remote-code",)))
        assert "/models/m" in line
        assert after(line, flag) == placement.model
        assert line[-1] == "--trust-remote-code"


@pytest.mark.parametrize(
    ("kind", "dtype"), [("vllm", "int8"), ("sglang", "int8"), ("lmdeploy", "float32"), ("lmdeploy", "float8_e4m3fn")]
)
def test_a_cache_that_the_engine_cannot_keep(mixed: Placement, kind: Kind, dtype: str) -> None:
    with pytest.raises(SolverError, match=f"{TITLES[kind]} keeps no cache of {dtype}"):
        words(mixed, one(mixed, kind, "both", kv_dtype=dtype))


@pytest.mark.parametrize("kind", ["sglang", "lmdeploy"])
def test_several_hosts_are_refused_by_name(mixed: Placement, kind: Kind) -> None:
    found = one(mixed, kind, "both", tp=16, hosts=2, image="mine:1").engine
    for format_ in emit.FORMATS:
        with pytest.raises(SolverError) as caught:
            emit.files(msgspec.structs.replace(mixed, engines=(found,)), format_)
        assert caught.value.field == "hosts"
        assert TITLES[kind] in caught.value.message or format_ != "k8s"


def test_the_router_asks_those_that_serve_alone_nothing_of_deeplinks(mixed: Placement, tmp_path: Path) -> None:
    found = members(mixed, KNOWN)
    path = tmp_path / "deeplink.toml"
    path.write_text(configs.router(mixed, found, {member.name: "http://h:1" for member in found}, port=8000))
    by_name = {engine.name: engine.kind for engine in config.load(path).engines}
    for member in found:
        plain = member.engine.role == "both" and member.engine.kind != "vllm"
        assert by_name[member.name] == ("plain" if plain else "deeplink")


def manifests(placement: Placement) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return list(yaml.load_all(emit.files(placement, "k8s")["placement.yaml"], Loader=loader))


def test_kubernetes_takes_the_manifests(everywhere: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    monkeypatch.setattr(validator.utils, "schema_contents", functools.cache(validator.utils.schema_contents))
    found = manifests(everywhere)
    assert {one["kind"] for one in found} == {"ConfigMap", "Deployment", "Service"}
    for manifest in found:
        validator.validate(manifest, "1.33", strict=True)


def test_kubernetes_starts_each_with_its_image_and_looks_at_its_health(everywhere: Placement) -> None:
    deployments = [manifest for manifest in manifests(everywhere) if manifest["kind"] == "Deployment"]
    pods = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in deployments}
    for member in members(everywhere, KNOWN):
        (container,) = pods[member.label]["containers"]
        end = "" if member.engine.kind == "vllm" else f"-{member.engine.kind}"
        assert container["image"] == f"deeplink-{member.chip_label}{end}"
        # The chip is the node's, whatever runs on it.
        assert pods[member.label]["nodeSelector"] == {"deeplink/chip": member.chip_label}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["control"] == ports["api"] + CONTROL_OFFSET
        flag = "--server-port" if member.engine.kind == "lmdeploy" else "--port"
        assert after(container["args"], flag) == str(ports["api"])
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "api"}
        given = {one["name"]: one.get("value") for one in container["env"]}
        assert given.get("DEEPLINK_CONFIG") == (None if end == "" else "/run/deeplink/deeplink.toml")


def test_compose_takes_the_file_and_builds_each_image(everywhere: Placement) -> None:
    reader = pytest.importorskip("compose_spec")
    files = emit.files(everywhere, "compose")
    read = reader.PyCompose.from_yaml(files["compose.yaml"])
    assert set(read.service_names()) == {"router", *(member.label for member in members(everywhere, KNOWN))}
    services = yaml.safe_load(files["compose.yaml"])["services"]
    for member in members(everywhere, KNOWN):
        service = services[member.label]
        text = files[service["build"]["dockerfile"]]
        assert text.startswith(f"# {member.title} with deeplink for {member.engine.chip}.")
        if member.engine.kind != "vllm":
            assert service["environment"]["DEEPLINK_CONFIG"] == "/etc/deeplink.toml"
    assert "# Ascend 910B: which tag of quay.io/ascend/sglang is for it is not known" in files["compose.yaml"]
    assert "# MetaX C550: no image with LMDeploy for it is known" in files["compose.yaml"]


def test_two_kinds_on_one_chip_are_two_images(mixed: Placement) -> None:
    found = members(mixed, KNOWN)
    assert len({images.image(member) for member in found}) == len({images.dockerfile(member) for member in found}) == 3


def test_ray_tells_nodes_apart_by_what_is_installed_on_them(mixed: Placement) -> None:
    files = emit.files(mixed, "ray")
    engines = json.loads(files["ray.json"])["engines"]
    asked = {m.engine.kind: list(made["resources"]) for m, made in zip(members(mixed, KNOWN), engines, strict=True)}
    assert asked == {
        "vllm": ["deeplink-nvidia-h20"],
        "sglang": ["deeplink-nvidia-h20-sglang"],
        "lmdeploy": ["deeplink-nvidia-h20-lmdeploy"],
    }
    assert "Every node has vLLM or SGLang or LMDeploy" in files["start.sh"]
    assert "# SGLang and LMDeploy there by the python3 that Ray's processes find." in files["start.sh"]


def test_the_local_script_runs_each_by_its_own_python(mixed: Placement, tmp_path: Path) -> None:
    folder = tmp_path / "placement"
    save(folder, emit.files(mixed, "local"))
    paths = {}
    for name in ("vllm", "sglang", "lmdeploy"):
        fake = paths[name] = tmp_path / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f'#!/bin/sh\necho {name} "$@"\ncat "${{DEEPLINK_CONFIG:-/dev/null}}"\n')
        fake.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    env |= {"SGLANG_PYTHON": str(paths["sglang"]), "LMDEPLOY_PYTHON": str(paths["lmdeploy"])}
    subprocess.run([str(folder / "engines.sh")], check=True, timeout=10, cwd=tmp_path, env=env)
    for member in members(mixed, KNOWN):
        first, *rest = (folder / f"{member.label}.log").read_text().splitlines()
        assert first.split()[0] == member.engine.kind
        assert ("[kv]" in rest) == (member.engine.kind != "vllm")


def test_a_variable_that_looks_like_the_command_stays_as_it_is(mixed: Placement) -> None:
    member = one(mixed, "sglang", "both", variables={"SAID": "python3 -m sglang"})
    script = emit.files(msgspec.structs.replace(mixed, engines=(member.engine,)), "local")["engines.sh"]
    line = next(line for line in script.splitlines() if "launch_server" in line)
    assert shlex.split(line.partition(" > ")[0])[3:5] == ["SAID=python3 -m sglang", "$SGLANG_PYTHON"]


@pytest.mark.parametrize("format_", list(emit.FORMATS))
def test_the_same_bytes(everywhere: Placement, format_: str) -> None:
    assert emit.files(everywhere, format_, KNOWN) == emit.files(everywhere, format_, dict(reversed(KNOWN.items())))


def test_configurations_are_read(everywhere: Placement) -> None:
    for name, text in emit.files(everywhere, "compose").items():
        if name.endswith(".toml"):
            config.parse(tomllib.loads(text), name)

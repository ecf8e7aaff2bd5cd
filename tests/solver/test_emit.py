"""What a placement is started with."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path

import pytest
from described import FLEET, write

from deeplink import config
from deeplink.errors import SolverError
from deeplink.solver import emit, fleetfile
from deeplink.solver.place import place
from deeplink.solver.placement import Placement
from vllm_deeplink import flags


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Placement:
    return place(fleetfile.load(write(tmp_path_factory.mktemp("fleet"))))


def test_the_router_reads_its_file(placement: Placement, tmp_path: Path) -> None:
    files = emit.local(placement)
    (tmp_path / "deeplink.toml").write_text(files["deeplink.toml"])
    read = config.load(tmp_path / "deeplink.toml")
    assert len(read.engines) == sum(engine.count for engine in placement.engines)
    ports = [command.words[command.words.index("--port") + 1] for command in emit.commands(placement)]
    assert [engine.url.rpartition(":")[2] for engine in read.engines] == ports


def test_the_script_is_one(placement: Placement, tmp_path: Path) -> None:
    script = tmp_path / "engines.sh"
    script.write_text(emit.local(placement)["engines.sh"])
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=10)


def test_commands_say_what_was_planned(placement: Placement) -> None:
    commands = {command.name: command for command in emit.commands(placement)}
    chips: dict[str, list[str]] = {}
    for engine in placement.engines:
        for index in range(engine.count):
            command = commands[emit.name(engine, index)]
            assert shlex.split(str(command))[-len(command.words) :] == list(command.words)
            assert command.words[:3] == ("vllm", "serve", placement.model)
            assert command.words[command.words.index("--deeplink-role") + 1] == engine.role
            assert command.words[command.words.index("--tensor-parallel-size") + 1] == str(engine.tp)
            chips.setdefault(engine.pool, []).extend(dict(command.variables)["CUDA_VISIBLE_DEVICES"].split(","))
    for given in chips.values():
        assert given == [str(number) for number in range(len(given))]


def test_nothing_to_start(tmp_path: Path) -> None:
    none = place(fleetfile.load(write(tmp_path, FLEET.replace("rate = 6", "rate = 6000"))))
    assert none.status == "infeasible"
    with pytest.raises(SolverError, match="nothing to start"):
        emit.commands(none)


def test_the_plugin_takes_its_flags(placement: Placement) -> None:
    """As vLLM's parser does with the plugin; the other flags are vLLM's own."""
    parser = argparse.ArgumentParser()
    flags._add(parser)
    for command in emit.commands(placement):
        taken, rest = parser.parse_known_args(command.words[3:])
        assert taken.platform == "deeplink"
        assert taken.deeplink_role in ("prefill", "decode", "both")
        assert not [word for word in rest if "deeplink" in word]

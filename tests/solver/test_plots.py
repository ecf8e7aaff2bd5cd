from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from described import FLEET, write

from deeplink.cli import main

pytest.importorskip("matplotlib")


def test_the_same_pictures(tmp_path: Path) -> None:
    path = str(write(tmp_path, FLEET + "[solve]\nverify = true\n"))
    run = CliRunner()
    for folder in ("once", "again"):
        done = run.invoke(main, ["solve", path, "--plots", str(tmp_path / folder)])
        assert done.exit_code == 0, done.output
    names = sorted(file.name for file in (tmp_path / "once").iterdir())
    assert names == ["busy.svg", "limits.svg", "times.svg"]
    for name in names:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert run.invoke(main, ["solve", path, "--pareto", "2", "--plots", str(tmp_path / "front")]).exit_code == 0
    assert (tmp_path / "front" / "front.svg").exists()

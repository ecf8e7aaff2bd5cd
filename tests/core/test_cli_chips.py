"""`deeplink chips`, on the machine that runs the tests."""

from __future__ import annotations

import json

from click.testing import CliRunner

from deeplink.chips.catalogue import PROFILES
from deeplink.cli import main


def test_a_table() -> None:
    done = CliRunner().invoke(main, ["chips"])
    assert done.exit_code == 0, done.output
    assert "CPU" in done.output


def test_json_has_what_was_detected_and_what_comes_of_it() -> None:
    done = CliRunner().invoke(main, ["chips", "--json", "--wait", "0.1"])
    assert done.exit_code == 0, done.output
    value = json.loads(done.output)
    assert value["chips"][0]["name"].startswith("CPU")
    assert value["chips"][0]["standing"] == "works"
    assert value["detected"]["cpu"]["cores"] > 0
    known = {profile.name for profile in PROFILES}
    assert {card["chip"] for one in value["detected"]["found"] for card in one["cards"]} <= known | {None}
    assert value["detected"]["milliseconds"] < 2000

"""What was asked for, in whichever way; what vLLM makes of it is in `tests/engines/test_flags.py`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink import config
from deeplink.errors import ConfigError
from vllm_deeplink import asked
from vllm_deeplink.asked import Asked

said = st.builds(
    Asked,
    st.none() | st.sampled_from(["prefill", "decode"]),
    st.none() | st.text(max_size=3),
    st.none() | st.integers(0, 65535),
    st.none() | st.text(max_size=3),
)


@given(said, said, said)
def test_over(a: Asked, b: Asked, c: Asked) -> None:
    assert a.over(b).over(c) == a.over(b.over(c))
    assert a.over(Asked()) == Asked().over(a) == a.over(a) == a
    assert set(a.over(b).said) == set(a.said) | set(b.said)


def test_flags() -> None:
    args = argparse.Namespace(deeplink_role="decode", deeplink_control_port=0, platform="deeplink")
    assert asked.by_flags(args) == Asked(role="decode", control_port=0)
    assert asked.by_flags(argparse.Namespace()) == Asked()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (asked.ROLE, asked.PORT, asked.ROUTER):
        monkeypatch.delenv(name, raising=False)
    assert asked.by_environment() == Asked()
    monkeypatch.setenv(asked.ROLE, "prefill")
    monkeypatch.setenv(asked.PORT, "0")
    monkeypatch.setenv(asked.ROUTER, "http://router")
    assert asked.by_environment() == Asked("prefill", None, 0, "http://router")
    for wrong in ("", "-1", "65536", "http", "1.5"):
        monkeypatch.setenv(asked.PORT, wrong)
        with pytest.raises(ConfigError) as caught:
            asked.by_environment()
        assert (caught.value.field, caught.value.ours) == (asked.PORT, wrong)


def test_table() -> None:
    assert asked.by_table({}) is None
    assert asked.by_table({"other": 1}) is None
    assert asked.by_table({"deeplink": {}}) == Asked()
    given = {"role": "decode", "config": Path("/etc/deeplink.toml"), "control-port": 9000, "router": None}
    assert asked.by_table({"deeplink": given}) == Asked("decode", "/etc/deeplink.toml", 9000)
    assert asked.without_table({"deeplink": {}, "other": 1}) == {"other": 1}


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("decode", "it is no table"),
        (None, "it is no table"),
        ({"rol": "decode"}, "there is no such setting"),
        ({"role": 1}, "role is no text"),
        ({"control_port": "http"}, "control_port is not a port"),
        ({"control_port": -1}, "control_port is not a port"),
    ],
)
def test_a_wrong_table(table: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        asked.by_table({"deeplink": table})


@pytest.mark.parametrize(
    ("args", "url"),
    [
        ({}, "http://10.0.0.7:8000"),
        ({"host": "0.0.0.0", "port": 1234}, "http://10.0.0.7:1234"),
        ({"host": "::"}, "http://10.0.0.7:8000"),
        ({"host": "fd00::1"}, "http://[fd00::1]:8000"),
        ({"host": "node-3", "ssl_certfile": "c.pem"}, "https://node-3:8000"),
        ({"uds": "/run/vllm.sock"}, None),
    ],
)
def test_where_the_api_is(args: dict[str, Any], url: str | None, tmp_path: Path) -> None:
    file = tmp_path / "deeplink.toml"
    file.write_text('[kv]\nhost = "10.0.0.7"\n')
    assert asked.api_url(argparse.Namespace(**args), str(file)) == url


def registers(router: str | None, api: str | None, **sections: dict[str, str]) -> dict[str, str] | None:
    return asked.registration(Asked(router=router), config.parse(dict(sections), "test"), api)


HERE, THERE = "http://127.0.0.1:8000", "http://10.0.0.9:8000"


def test_what_a_router_is_told() -> None:
    assert registers(None, HERE) is None
    assert registers(HERE + "/", HERE) == {"router": HERE, "url": HERE, "name": "127.0.0.1:8000", "api": HERE}
    more = {"router": THERE, "name": "a", "url": "https://a.example"}
    assert registers(None, None, registration=more, kv={"host": "10.0.0.1"}) == {
        **more,
        "api": more["url"],
    }
    assert registers(HERE, HERE, registration=more) == {**more, "router": HERE, "api": HERE}


@pytest.mark.parametrize(
    ("router", "api", "sections", "field"),
    [
        (HERE, None, {}, "registration.url"),
        ("10.0.0.9:8000", HERE, {}, "deeplink-router"),
        (THERE, HERE, {}, "kv.host"),
        (THERE, "http://10.0.0.1:8000", {}, "kv.host"),
        (THERE, HERE, {"kv": {"host": "10.0.0.1"}}, "registration.url"),
        (THERE, "http://localhost:8000", {"kv": {"host": "10.0.0.1"}}, "registration.url"),
        ("http://router", "http://[::1]:8000", {"kv": {"host": "fd00::1"}}, "registration.url"),
    ],
)
def test_what_no_router_could_use(router: str, api: str | None, sections: dict[str, Any], field: str) -> None:
    """The default is this host alone, which another host would take for itself."""
    with pytest.raises(ConfigError) as caught:
        registers(router, api, **sections)
    assert caught.value.field == field

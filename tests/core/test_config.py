"""deeplink.toml: what is wrong is named; what is left out has a default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deeplink.config import VARIABLE, Config, control_port, control_url, load, parse
from deeplink.errors import ConfigError

GOOD = """
secret_file = "/etc/deeplink/secret"
[router]
port = 8080
[kv]
staging = 1000000
digest = "off"
[[engines]]
name = "a"
url = "http://10.0.0.1:8001"
[[engines]]
name = "b"
url = "http://10.0.0.2:8001"
control = "http://10.0.0.2:7000"
"""


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "deeplink.toml"
    path.write_text(GOOD)
    config = load(path)
    assert config.secret_file == Path("/etc/deeplink/secret")
    assert (config.router.port, config.router.host) == (8080, "127.0.0.1")
    assert (config.kv.staging, config.kv.digest, config.kv.chunk) == (1_000_000, "off", 8 << 20)
    assert [engine.control for engine in config.engines] == ["http://10.0.0.1:9001", "http://10.0.0.2:7000"]


def test_the_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deeplink.toml"
    path.write_text("[router]\nport = 1\n")
    monkeypatch.setenv(VARIABLE, str(path))
    assert load().router.port == 1
    other = tmp_path / "other.toml"
    other.write_text("")
    assert load(other).router.port == 8000
    monkeypatch.delenv(VARIABLE)
    assert load() == Config()


def engine(**changes: Any) -> dict[str, Any]:
    return {"engines": [{"name": "a", "url": "http://h:1", **changes}]}


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"roter": {}}, "roter"),
        ({"router": {"prot": 1}}, "router.prot"),
        ({"router": {"port": 65536}}, "router.port"),
        ({"router": {"port": -1}}, "router.port"),
        ({"router": {"port": "x"}}, "router.port"),
        ({"router": {"deadline": 0}}, "router.deadline"),
        ({"router": {"max_body": 0}}, "router.max_body"),
        ({"router": {"poll": -1.0}}, "router.poll"),
        ({"router": []}, "router"),
        ({"kv": {"staging": 0}}, "kv.staging"),
        ({"kv": {"chunk": -5}}, "kv.chunk"),
        ({"kv": {"chunk": (256 << 20) + 1}}, "kv.chunk"),
        ({"kv": {"digest": "sometimes"}}, "kv.digest"),
        ({"kv": {"trust": "everyone"}}, "kv.trust"),
        ({"kv": {"host": 7}}, "kv.host"),
        ({"kv": {"streams": 17}}, "kv.streams"),
        ({"kv": {"streams": -1}}, "kv.streams"),
        ({"kv": {"tls": {"certificate": "a", "key": "b"}}}, "kv.tls.ca"),
        ({"kv": {"tls": {"certificate": "a", "key": "b", "ca": 7}}}, "kv.tls.ca"),
        ({"kv": {"tls": {"certificate": "a", "key": "b", "ca": "c", "verify": False}}}, "kv.tls.verify"),
        ({"secret_file": 7}, "secret_file"),
        ({"engines": {}}, "engines"),
        ({"engines": [{"url": "http://h:1"}]}, "engines.0.name"),
        ({"engines": [{"name": "a"}]}, "engines.0.url"),
        (engine(url="h:8000"), "engines.0.url"),
        (engine(url="ftp://h:8000"), "engines.0.url"),
        (engine(url="http://h:8000/v1"), "engines.0.url"),
        (engine(url="http://"), "engines.0.url"),
        (engine(url="http://h:65536"), "engines.0.url"),
        (engine(url="http://h:0"), "engines.0.url"),
        (engine(url="http://h:port"), "engines.0.url"),
        (engine(url="http://[::1:80"), "engines.0.url"),
        (engine(control="h:9000"), "engines.0.control"),
        (engine(control="http://h:99999"), "engines.0.control"),
        (engine(wait=1), "engines.0.wait"),
        (engine(weight=0), "engines.0.weight"),
        (engine(name=""), "engines.0.name"),
        (engine(name="a\r\nb"), "engines.0.name"),
    ],
)
def test_a_bad_value_is_named(data: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data, "deeplink.toml")
    assert caught.value.field == field
    assert "deeplink.toml" in caught.value.message
    assert caught.value.ours


def test_a_name_used_twice() -> None:
    twice = {"engines": [{"name": "a", "url": f"http://h:{port}"} for port in (1, 2)]}
    with pytest.raises(ConfigError, match="engine name used twice: a"):
        parse(twice, "deeplink.toml")


@pytest.mark.parametrize("content", [b"[router", b"\xff\xfe", b"a = 1\na = 2\n", b"a = " + b"[" * 100_000])
def test_not_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "deeplink.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"deeplink\.toml is not TOML"):
        load(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone"):
        load(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("url", "control"),
    [
        ("http://h:8000", "http://h:9000"),
        ("https://h", "https://h:1443"),
        ("http://h", "http://h:1080"),
        ("http://[::1]:8000", "http://[::1]:9000"),
        ("http://[::1]", "http://[::1]:1080"),
        ("http://h:65000", "http://h:64000"),
    ],
)
def test_control_url(url: str, control: str) -> None:
    assert control_url(url) == control
    assert parse({"engines": [{"name": "a", "url": url}]}, "x").engines[0].control == control


@pytest.mark.parametrize(("rank", "control"), [(None, "http://h:9000"), (0, "http://h:9000"), (3, "http://h:9003")])
def test_the_control_endpoints_of_data_parallel_ranks_follow_each_other(rank: int | None, control: str) -> None:
    engine = {"name": "a", "url": "http://h:8000", "rank": rank}
    assert parse({"engines": [engine]}, "x").engines[0].control == control


def test_a_data_parallel_rank_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 60000 would be 69000"):
        parse({"engines": [{"name": "a", "url": "http://h:8000", "rank": 60000}]}, "x")


def test_control_port_is_a_port_and_not_a_system_port() -> None:
    for port in range(1, 65536):
        found = control_port(port)
        assert 1000 < found <= 65535
        assert abs(found - port) == 1000


def test_it_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().kv = None  # type: ignore[misc, assignment]

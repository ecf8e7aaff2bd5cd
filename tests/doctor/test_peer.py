"""`--peer`: a live control endpoint or a file, and what becomes of it with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import loopback
import msgspec
import pytest
from looking import SECRET, by_name, look
from loopback import HND, VEC, make_contract, make_group, make_pair

from deeplink.doctor import peer
from deeplink.doctor.model import diagnose
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.contract import Contract
from deeplink.kvconnector.control import Blocks, Control

replace = msgspec.structs.replace
PREFILL = make_contract("p", "prefill", make_group(VEC, 64), channel="127.0.0.1:1", tcp="127.0.0.1:2")
DECODE = make_contract("d", "decode", make_group(HND, 128), channel="127.0.0.1:3", tcp="127.0.0.1:4")
Serve = Callable[[Contract], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Control] = []

    def _serve(contract: Contract) -> str:
        made.append(Control(contract, SECRET, lambda: Blocks(10, 3)))
        return f"http://127.0.0.1:{made[-1].start('127.0.0.1', 0)}"

    yield _serve
    for control in made:
        control.close()


def config(**engines: str) -> str:
    text = 'secret_file = "secret"\n'
    for name, url in engines.items():
        text += f'[[engines]]\nname = "{name}"\nurl = "http://127.0.0.1:1"\ncontrol = "{url}"\n'
    return text


def standings(text: str, engine: str, api: bool = False) -> dict[str, str]:
    section = peer.examine(look(text), engine, api)
    assert section.name == f"peer {engine}"
    return {finding.name: finding.standing for finding in section.findings}


def test_a_live_engine_and_all_the_others(serve: Serve) -> None:
    other = replace(DECODE, epoch="x", model=replace(DECODE.model, weights="other"))
    text = config(a=serve(PREFILL), b=serve(DECODE), c=serve(other), gone="http://127.0.0.1:1")
    section = peer.examine(look(text), "a", False)
    found = by_name(section)
    assert found["contract"].facts["contract"] == PREFILL
    assert found["a -> b"].standing == "works"
    assert found["a -> b"].text == "exact over tcp"
    refused = found["a -> c"]
    assert refused.standing == "failed"
    assert refused.reason is not None
    assert (refused.reason.code, refused.reason.field) == ("contract_refused", "model.weights")
    assert (refused.reason.ours, refused.reason.theirs) == ("w", "other")
    assert refused.reason.remedy == "serve the same checkpoint on both engines"
    assert found["gone"].standing == "unknown"
    assert diagnose([section]).exit_code == 1


def test_what_it_is_doing() -> None:
    pair = make_pair()
    control = Control(pair.producer.endpoint.contract, loopback.SECRET, lambda: Blocks(10, 3))
    try:
        Path("secret").write_bytes(loopback.SECRET)
        url = f"http://127.0.0.1:{control.start('127.0.0.1', 0)}"
        found = by_name(peer.examine(look(config(a=url)), "a", False))["status"]
        assert found.standing == "works"
        assert found.text.startswith("3 of 10 blocks held, 0 of 2097152 bytes of staging used")
        assert found.facts["status"]["handoffs"] == 0
    finally:
        control.close()
        pair.close()


def test_an_engine_whose_cache_does_not_answer(serve: Serve) -> None:
    """The control endpoint is up; the process with the cache, which it asks for the status, is not."""
    found = by_name(peer.examine(look(config(a=serve(PREFILL))), "a", False))
    assert (found["contract"].standing, found["status"].standing) == ("works", "unknown")


def test_both_ways(serve: Serve) -> None:
    both = [serve(replace(contract, role="both")) for contract in (PREFILL, DECODE)]
    found = standings(config(a=both[0], b=both[1]), "b")
    assert (found["a -> b"], found["b -> a"]) == ("works", "works")


def test_by_url_and_by_file(serve: Serve, home: Path) -> None:
    url = serve(PREFILL)
    text = config(a=url, b=serve(DECODE))
    assert standings(text, url)[f"{url} -> b"] == "works"
    (home / "kept").write_bytes(co.encode(PREFILL))
    found = standings(text, "kept")
    assert found["kept -> b"] == "works"
    assert "status" not in found
    assert "kept -> a" not in found  # it is that one


def test_nobody_of_the_other_role(serve: Serve) -> None:
    section = peer.examine(look(config(a=serve(PREFILL), b=serve(replace(PREFILL, epoch="q")))), "a", False)
    found = by_name(section)["pairs"]
    assert found.standing == "failed"
    assert found.reason is not None
    assert (found.reason.field, found.reason.ours) == ("role", "prefill")


def test_nobody_else(serve: Serve) -> None:
    assert standings(config(a=serve(PREFILL)), "a")["pairs"] == "off"


@pytest.mark.parametrize("engine", ["a", "http://127.0.0.1:1", "http://h/x", "none of that name"])
def test_nobody_there(engine: str) -> None:
    section = peer.examine(look(config(a="http://127.0.0.1:1")), engine, False)
    (found,) = section.findings
    assert found.standing == "unknown"
    assert found.reason is not None
    assert found.reason.remedy
    assert diagnose([section]).exit_code == 2


def test_another_secret(serve: Serve, home: Path) -> None:
    (home / "secret").write_bytes(b"another secret of 32 bytes, more")
    (found,) = peer.examine(look(config(a=serve(PREFILL))), "a", False).findings
    assert found.standing == "unknown"
    assert found.reason is not None
    assert "answered 401" in found.reason.message
    assert "secret_file" in found.reason.remedy


def test_a_configuration_that_cannot_be_read() -> None:
    assert standings("[roter]\n", "a") == {"a": "unknown"}

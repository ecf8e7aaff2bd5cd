"""Calls into an engine core that may give it other weights."""

from __future__ import annotations

from typing import Any

import pytest

from deeplink.errors import ConfigError
from vllm_deeplink import changes, identity


def made_core() -> Any:
    class EngineCore:
        """As much of vLLM's as is wrapped."""

        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            return [(method, timeout, args, kwargs)]

        def add_lora(self, lora_request: Any) -> Any:
            return lora_request

    changes.install(EngineCore)
    return EngineCore()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(changes, "_watching", [found.append])
    return found


def reload(model: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "name"),
    [("reload_weights", "reload_weights"), ("update_weights_from_ipc", "update_weights_from_ipc"), (reload, "reload")],
)
def test_a_call_that_may_change_weights_is_heard_of_and_made(heard: list[str], method: Any, name: str) -> None:
    assert made_core().collective_rpc(method, 1.0, args=(2,)) == [(method, 1.0, (2,), None)]
    assert heard == [name]
    assert made_core().collective_rpc(method=method) == [(method, None, (), None)]


@pytest.mark.parametrize("method", sorted(changes.HARMLESS))
def test_one_that_does_not_is_only_made(heard: list[str], method: str) -> None:
    assert made_core().collective_rpc(method) == [(method, None, (), None)]
    assert heard == []


def test_one_that_has_heard_enough_may_leave_while_it_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def once(name: str) -> None:
        changes.forget(once)
        found.append(name)

    monkeypatch.setattr(changes, "_watching", [once, found.append])
    core = made_core()
    core.collective_rpc("apply_model")
    core.collective_rpc("reload_weights")
    assert found == ["apply_model", "apply_model", "reload_weights"]
    changes.forget(once)


def test_it_wraps_once(heard: list[str]) -> None:
    core = made_core()
    changes.install(type(core))
    core.collective_rpc("reload_weights")
    assert heard == ["reload_weights"]


def test_an_adapter_is_noted_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(identity, "note", noted.append)
    assert made_core().add_lora("an adapter") == "an adapter"
    assert noted == ["an adapter"]


@pytest.mark.parametrize("lacks", ["collective_rpc", "add_lora"])
def test_a_core_without_them_is_refused(lacks: str) -> None:
    core = type("EngineCore", (), {name: print for name in ("collective_rpc", "add_lora") if name != lacks})
    with pytest.raises(ConfigError) as caught:
        changes.install(core)
    assert caught.value.field == f"EngineCore.{lacks}"

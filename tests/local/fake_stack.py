"""A router and two engines that answer what they are told to, on real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deeplink.config import control_port
from deeplink.kvconnector.contracts import contract
from deeplink.kvconnector.contracts.contract import CacheGroup, Contract, Model, Rank
from deeplink.local.engines import Engine, free_ports
from deeplink.local.kinds import KINDS
from deeplink.local.measure import Stack

TOKEN = "opens the control endpoints"
PROMPT_TOKENS = 10
LAYOUT = "block head (k: dim token | v: token dim)"


@dataclass
class Script:
    """What the stack says. Everything is well unless a test changes it."""

    path: str = "handoff"
    external: int = PROMPT_TOKENS - 1
    tokens: list[int] = field(default_factory=lambda: list(range(64)))
    tokens_alone: list[int] = field(default_factory=lambda: list(range(64)))
    digest: dict[str, str] = field(default_factory=lambda: {"prefill": "0a" * 8, "decode": "0a" * 8})
    state: dict[str, str] = field(default_factory=lambda: {"prefill": "drained", "decode": "loaded"})
    held: dict[str, int] = field(default_factory=lambda: {"blocks": 0, "staging": 0, "claims": 0})
    weights: dict[str, str] = field(default_factory=lambda: {"prefill": "w", "decode": "w"})
    cut: bool = False
    error: str = ""
    counted: dict[str, int] = field(default_factory=lambda: {"local_compute": 7, "external_kv_transfer": 3})
    counts: bool = True
    loaded: int = PROMPT_TOKENS
    salts: list[str] = field(default_factory=list)


@contextmanager
def fake_stack(script: Script) -> Iterator[Stack]:
    prefill, decode = (
        Engine(name=role, role=role, port=port, model=Path("/m"), block_size=block)
        for role, port, block in zip(("prefill", "decode"), free_ports(2), (64, 128), strict=True)
    )
    with ExitStack() as ends:
        for engine in (prefill, decode):
            ends.enter_context(_serve(script, engine.role, engine.port))
            ends.enter_context(_serve(script, engine.role, control_port(engine.port)))
        (port,) = free_ports(1)
        kind = KINDS["vllm"] if script.counts else replace(KINDS["vllm"], counts=False, ids=False)
        ends.enter_context(_serve(script, "router", port))
        yield Stack(prefill, decode, decode, kind, f"http://127.0.0.1:{port}", TOKEN)


@contextmanager
def _serve(script: Script, role: str, port: int) -> Iterator[None]:
    handler = type("Handler", (_Handler,), {"script": script, "role": role})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    script: Script
    role: str

    def do_GET(self) -> None:
        if self.path == "/metrics" and not self.script.counts:
            self.send_error(404)
        elif self.path == "/metrics":
            lines = (
                f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="demo",source="{source}"}} {count}.0'
                for source, count in self.script.counted.items()
            )
            self._send("\n".join(lines).encode())
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.send_error(401)
        elif self.path == "/v1/contract":
            self._send(contract.encode(self._contract()))
        elif self.path == "/v1/status":
            held = self.script.held
            status = {"blocks": {"held": held["blocks"]}, "staging": {"used": held["staging"]}}
            self._send(json.dumps(status | {"claims": held["claims"]}).encode())
        else:
            said = {"state": self.script.state[self.role], "digest": self.script.digest[self.role]}
            self._send(
                json.dumps(
                    said | {"tokens": self.script.loaded, "kv_bytes": 4096, "milliseconds": 2.5, "reason": None}
                ).encode()
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script, counted = self.script, self.script.counted
        if self.role == "router":
            counted["external_kv_transfer"] += script.external
            counted["local_compute"] += PROMPT_TOKENS - script.external
            marks = {"x-deeplink-path": script.path, "x-deeplink-handoff": "h1"}
            self._answer(body, script.tokens, marks)
        else:
            script.salts.append(body["cache_salt"])
            counted["local_compute"] += PROMPT_TOKENS
            self._answer(body, script.tokens_alone, {})

    def _answer(self, body: dict[str, Any], tokens: list[int], marks: dict[str, str]) -> None:
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(tokens)}
        asked = body.get("return_token_ids")
        if not body.get("stream"):
            choice = {"text": "all", "token_ids": tokens}
            self._send(json.dumps({"choices": [choice], "usage": usage}).encode(), marks)
            return
        choices = [{"text": f" {token}", **({"token_ids": [token]} if asked else {})} for token in tokens]
        events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
        events.append({"choices": [], "usage": usage})
        if self.script.error:
            events = [{"error": {"message": self.script.error}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("".join([*lines, "" if self.script.cut else "data: [DONE]\n\n"]).encode(), marks)

    def _contract(self) -> Contract:
        block = {"prefill": 64, "decode": 128}[self.role]
        return Contract(
            engine="vllm",
            engine_version="0",
            chip="cpu",
            role=self.role,
            epoch=self.role,
            model=Model("Llama", 2, 100, "{}", "none", self.script.weights[self.role]),
            groups=(CacheGroup("full", (0, 1), 2, 16, "float32", block, LAYOUT),),
            ranks=(Rank(0, 0, 0, ((0, 2),), (0, 2), "127.0.0.1:1", {"tcp": "127.0.0.1:2"}),),
        )

    def _send(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass

"""An OpenAI endpoint that streams as many tokens as it is asked for, and remembers the prompts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """A token takes `pause` seconds, so that requests that come together decode together; `per_event` come in an
    event; `cut` streams end early; `status` and `error` go wrong otherwise."""

    most: int | None = 4096
    owner: Any = None
    pause: float = 0.005
    per_event: int = 1
    says_ids: bool = True
    usage: bool = False
    cut: bool = False
    status: int = 200
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    handoffs: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"script": script}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    script: Script

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.script.keys.add(self.headers.get("Authorization", ""))
        if self.path.startswith("/v1/handoffs/"):
            self._json(self.script.handoffs)
            return
        served: dict[str, Any] = {"id": "served"}
        if self.script.most:
            served["max_model_len"] = self.script.most
        if self.script.owner is not None:
            served["owned_by"] = self.script.owner
        self._json({"data": [served]})

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.requests.append(body)
        script.keys.add(self.headers.get("Authorization", ""))
        if script.status != 200:
            self._json({"error": "no"}, script.status)
            return
        self.send_response(200)
        for name, value in script.headers.items():
            self.send_header(name, value)
        self.end_headers()
        left = body["max_tokens"]
        while left > 0:
            count = min(script.per_event, left)
            left -= count
            time.sleep(script.pause * count)
            choice: dict[str, Any] = {"text": "x" * count}
            if script.says_ids:
                choice["token_ids"] = [7] * count
            self._event({"choices": [choice]})
            if script.error:
                self._event({"error": script.error})
            if script.cut:
                return
        if script.usage:
            self._event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

"""The router's own cost on one pinned core, beside vllm-router, sglang-router, smg, nginx and a bare proxy, in one run.

    python benchmarks/router.py --peers FOLDER [--json [FILE]] [--save] [--seconds N] [--rounds N]

FOLDER has a virtual environment for each of `vllm-router`, `sglang-router` and `smg`, under that name; those that
are not there are left out. wrk and nginx have to be on the PATH, uvloop and httptools beside deeplink. The router under
test runs on one core, the mock engines (two) and the load on another. CPU time is the kernel's, of the router's whole
tree of processes, so it holds where others share the machine; requests a second and latencies do not, and are beside a
direct run.

`deeplink` runs with a key for inference, limits, metrics, its access log and the policy that counts tokens;
`deeplink-stripped` without key, without a log, with round robin; `deeplink-workers` as `deeplink`, with two workers and
their owner, all on that core; `bare` is the proxy of `router_bare.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rows import RESULTS, Row, machine, table, write_table

HERE = Path(__file__).parent
ROUTER_CORE, LOAD_CORE = 0, 1
KEY = "a-key-of-the-benchmark"
TICK = os.sysconf("SC_CLK_TCK")
PEERS = ("vllm-router", "sglang-router", "smg")
PACE = 20
"""Milliseconds between the events of a paced stream."""
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
SCRIPT = """
function init(args)
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
  wrk.headers["authorization"] = "Bearer KEY"
  wrk.body = '{"model":"mock","messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":"'
    .. string.rep("word ", tonumber(args[1])) .. '"}],"max_tokens":20,"temperature":0}'
end
function done(summary, latency, requests)
  io.write(string.format('RESULT {"requests":%d,"rps":%.1f,"p50":%.4f,"p99":%.4f,"failed":%d}\\n',
    summary.requests, summary.requests / (summary.duration / 1e6), latency:percentile(50) / 1000,
    latency:percentile(99) / 1000, summary.errors.status + summary.errors.connect + summary.errors.read
    + summary.errors.write + summary.errors.timeout))
end
""".replace("Bearer KEY", f"Bearer {KEY}")
COMMON = """
worker_processes 1; daemon off; master_process off; pid NAME.pid; error_log /dev/null crit;
events { worker_connections 8192; }
http {
  access_log off; keepalive_requests 1000000000; keepalive_timeout 3600s; client_max_body_size 64m;
  client_body_buffer_size 128k; default_type application/json;
  client_body_temp_path NAME_b; proxy_temp_path NAME_p; fastcgi_temp_path NAME_f; uwsgi_temp_path NAME_u;
  scgi_temp_path NAME_s;
"""


@dataclass(slots=True)
class Measured:
    """One router. Times in milliseconds, CPU milliseconds for a request or 1,000 tokens."""

    cpu: list[float] = field(default_factory=list)
    cpu_large: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    rss: float = 0.0
    gaps: dict[int, float] = field(default_factory=dict)
    cpu_tokens: dict[int, float] = field(default_factory=dict)
    failed: int = 0


class Bench:
    def __init__(self, peers: Path | None, seconds: int, folder: Path) -> None:
        self.peers, self.seconds, self.folder = peers, seconds, folder
        self.plain, self.paced = ports(2), ports(2)
        (folder / "chat.lua").write_text(SCRIPT)
        (folder / "keys").write_text(KEY + "\n")
        (folder / "secret").write_text("s" * 32 + "\n")

    def names(self) -> list[str]:
        found = [name for name in PEERS if self.peers and (self.peers / name / "bin" / name).exists()]
        return [
            "deeplink",
            "deeplink-stripped",
            "deeplink-workers",
            "bare",
            *found,
            *(["nginx"] if shutil.which("nginx") else []),
        ]

    @contextmanager
    def engines(self) -> Iterator[None]:
        answers = [f"location = {path} {{ return 200 '{json.dumps(value)}'; }}" for path, value in _says().items()]
        servers = " ".join(f"listen 127.0.0.1:{port} backlog=4096;" for port in self.plain)
        chat = json.dumps(_answer())
        text = COMMON.replace("NAME", "mock") + (
            f"server {{ {servers} {' '.join(answers)} location = /health {{ return 200 '{{}}'; }}"
            f" location = /health_generate {{ return 200 '{{}}'; }} location / {{ return 200 '{chat}'; }} }} }}\n"
        )
        (self.folder / "mock.conf").write_text(text)
        with ExitStack() as stack:
            stack.enter_context(self.running(["nginx", "-p", self.folder, "-c", self.folder / "mock.conf"], LOAD_CORE))
            paced = [sys.executable, HERE / "router_engine.py", PACE, *self.paced]
            stack.enter_context(self.running(paced, LOAD_CORE))
            for port in (*self.plain, *self.paced):
                ready(port, "")
            yield

    def command(self, name: str, port: int, engines: list[int]) -> list[Any]:
        urls = [f"http://127.0.0.1:{engine}" for engine in engines]
        metrics = ports(1)[0]
        if name.startswith("deeplink"):
            full = name != "deeplink-stripped"
            lines = [
                f'secret_file = "{self.folder}/secret"',
                "[router]",
                f'decode_policy = "{"least_load" if full else "round_robin"}"',
                *([f'keys_file = "{self.folder}/keys"'] if full else []),
            ]
            for number, url in enumerate(urls):
                lines += ["[[engines]]", f'name = "e{number}"', f'url = "{url}"', 'kind = "plain"']
            config = self.folder / f"{name}.toml"
            config.write_text("\n".join(lines) + "\n")
            workers = 2 if name == "deeplink-workers" else 1
            quiet = "" if full else "logging.disable(logging.INFO);"
            program = f"import logging; {quiet} from deeplink.cli import main; main()"
            return [sys.executable, "-c", program, "router", "--config", config, "--port", port, "--workers", workers]
        if name == "bare":
            return [sys.executable, HERE / "router_bare.py", port, *engines]
        if name == "nginx":
            upstream = " ".join(f"server 127.0.0.1:{engine};" for engine in engines)
            config = self.folder / "proxy.conf"
            config.write_text(
                COMMON.replace("NAME", "proxy")
                + 'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;'
                + f"upstream all {{ {upstream} keepalive 1024; keepalive_requests 1000000000; }}"
                + f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://all; }} }} }}\n"
            )
            return ["nginx", "-p", self.folder, "-c", config]
        assert self.peers is not None
        same = ["--worker-urls", *urls, "--policy", "round_robin", "--port", port, "--prometheus-port", metrics]
        if name == "smg":
            return [self.peers / name / "bin" / "smg", "launch", *same, "--host", "127.0.0.1", "--log-level", "warn"]
        if name == "sglang-router":
            return [
                self.peers / name / "bin" / "python",
                "-m",
                "sglang_router.launch_router",
                *same,
                "--log-level",
                "warn",
            ]
        return [self.peers / name / "bin" / name, *same, "--log-level", "warning"]

    @contextmanager
    def running(self, command: list[Any], core: int) -> Iterator[int]:
        words = ["taskset", "-c", str(core), *(str(word) for word in command)]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process.pid
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(8)

    @contextmanager
    def router(self, name: str, engines: list[int]) -> Iterator[tuple[int, int]]:
        """Port and process of a router that answers."""
        if name == "direct":
            yield engines[0], 0
            return
        port = ports(1)[0]
        with self.running(self.command(name, port, engines), ROUTER_CORE) as process:
            ready(port, KEY)
            time.sleep(1)
            yield port, process

    def wrk(self, port: int, connections: int, words: int, seconds: int) -> dict[str, Any]:
        command = ["taskset", "-c", str(LOAD_CORE), "wrk", "-t1", f"-c{connections}", f"-d{seconds}s"]
        command += ["--timeout", "30s", "-s", str(self.folder / "chat.lua")]
        command += [f"http://127.0.0.1:{port}/v1/chat/completions", "--", str(words)]
        out = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True).stdout
        line = next(line for line in out.splitlines() if line.startswith("RESULT "))
        found: dict[str, Any] = json.loads(line[7:])
        return found

    def streams(self, port: int, count: int, tokens: int = 150) -> dict[str, Any]:
        command = ["taskset", "-c", str(LOAD_CORE), sys.executable, str(HERE / "router_streams.py")]
        command += [str(port), str(count), str(tokens), KEY]
        out = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
        found: dict[str, Any] = json.loads(out)
        return found

    def requests(self, name: str, into: Measured) -> None:
        with self.router(name, self.plain) as (port, process):
            self.wrk(port, 8, 200, 1)
            alone = self.wrk(port, 1, 200, self.seconds)
            into.p50.append(alone["p50"])
            into.p99.append(alone["p99"])
            for words, costs in ((200, into.cpu), (6500, into.cpu_large)):
                before = cpu(process)
                busy = self.wrk(port, 64, words, self.seconds)
                costs.append(1000 * (cpu(process) - before) / max(1, busy["requests"]))
                into.failed += busy["failed"]
                if words == 200:
                    into.rate.append(busy["rps"])
            into.rss = max(into.rss, rss(process))

    def pace(self, name: str, counts: list[int], into: Measured) -> None:
        with self.router(name, self.paced) as (port, process):
            self.streams(port, 8, 10)
            for count in counts:
                before = cpu(process)
                found = self.streams(port, count)
                into.gaps[count] = found["gap_p99"]
                into.cpu_tokens[count] = 1e6 * (cpu(process) - before) / max(1, found["tokens"])
                into.failed += found["failed"]
            into.rss = max(into.rss, rss(process))


def ports(count: int) -> list[int]:
    """Free ones, from below those that connections take."""
    found: list[int] = []
    sockets = []
    for port in range(21000 + os.getpid() % 5000, 32000):
        if len(found) == count:
            break
        one = socket.socket()
        if port in _taken or one.connect_ex(("127.0.0.1", port)) == 0:
            one.close()
            continue
        found.append(port)
        _taken.add(port)
        sockets.append(one)
    for one in sockets:
        one.close()
    return found


_taken: set[int] = set()


def ready(port: int, key: str, seconds: float = 60.0) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(CHAT).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if b"choices" in answer.read():
                    return
        except OSError:
            pass
        if time.monotonic() > until:
            raise TimeoutError(f"nothing answers at port {port}")
        time.sleep(0.2)


def tree(process: int) -> list[int]:
    found, todo = [], [process] if process else []
    while todo:
        one = todo.pop()
        found.append(one)
        with suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                todo += [int(word) for word in Path(f"/proc/{one}/task/{task}/children").read_text().split()]
    return found


def cpu(process: int) -> float:
    """Seconds."""
    total = 0
    for one in tree(process):
        with suppress(OSError):
            words = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(words[11]) + int(words[12])
    return total / TICK


def rss(process: int) -> float:
    """Megabytes."""
    total = 0
    for one in tree(process):
        with suppress(OSError):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total / 1024


def _says() -> dict[str, Any]:
    from router_engine import SAYS

    return SAYS


def _answer() -> dict[str, Any]:
    from router_engine import ANSWER

    return ANSWER


def sustained(nginx: Measured, direct: Measured) -> int:
    """The most streams at which nginx adds at most 2 ms to the 99th percentile of the gaps."""
    return max(
        [count for count in nginx.gaps if nginx.gaps[count] - direct.gaps[count] <= 2.0], default=min(nginx.gaps)
    )


def rows(found: dict[str, Measured]) -> list[Row]:
    ours, direct = found["deeplink"], found["direct"]
    peers = {name: one for name, one in found.items() if name in PEERS}

    def low(name: str, what: str) -> float:
        return min(getattr(found[name], what))

    def best(what: str) -> tuple[str, float]:
        name = min(peers, key=lambda name: low(name, what))
        return name, low(name, what)

    made = []
    if peers:
        name, mark = best("cpu")
        made += [
            Row("cpu_per_request", min(ours.cpu), "ms", name, mark, 0.6),
            Row("cpu_per_request_stripped", low("deeplink-stripped", "cpu"), "ms", name, mark),
            Row("cpu_per_request_workers", low("deeplink-workers", "cpu"), "ms", name, mark),
            Row("cpu_per_request_bare", low("bare", "cpu"), "ms", name, mark),
        ]
        name, mark = best("cpu_large")
        made.append(Row("cpu_per_request_32kb", min(ours.cpu_large), "ms", name, mark))
        for what in ("p50", "p99"):
            name, mark = best(what)
            base = low("direct", what)
            made.append(Row(f"added_latency_{what}", low("deeplink", what) - base, "ms", name, mark - base, 1.0))
        name = max(peers, key=lambda name: max(peers[name].rate))
        made.append(Row("requests_per_s", max(ours.rate), "1/s", name, max(peers[name].rate)))
        name = min(peers, key=lambda name: peers[name].rss)
        made.append(Row("rss_mb", ours.rss, "MB", name, peers[name].rss, 80.0, of="value"))
    if "nginx" in found:
        nginx = found["nginx"]
        count = sustained(nginx, direct)
        note = f"{count} streams of {1000 // PACE} events a second"
        added = ours.gaps[count] - direct.gaps[count]
        theirs = nginx.gaps[count] - direct.gaps[count]
        made.append(Row("added_gap_p99", added, "ms", "nginx", theirs, 2.0, of="value", note=note))
        made.append(
            Row("cpu_per_1000_tokens", ours.cpu_tokens[count], "ms", "nginx", nginx.cpu_tokens[count], note=note)
        )
        made.append(Row("cpu_per_request_vs_nginx", min(ours.cpu), "ms", "nginx", low("nginx", "cpu")))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--json", type=Path, nargs="?", const=Path("-"), help="the result, printed or into a file")
    parser.add_argument("--save", action="store_true", help="into results/, with a plot, and the table in README.md")
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 128, 256, 512])
    options = parser.parse_args()
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(options.peers, options.seconds, Path(made))
        names = ["direct", *bench.names()]
        with bench.engines():
            for turn in range(options.rounds):
                for name in names:
                    print(f"round {turn + 1}: {name}", file=sys.stderr, flush=True)
                    bench.requests(name, found.setdefault(name, Measured()))
            for name in names:
                if name not in ("deeplink-stripped", "deeplink-workers", "bare"):
                    print(f"streams: {name}", file=sys.stderr, flush=True)
                    try:
                        bench.pace(name, options.streams, found[name])
                    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
                        # One that cannot do it is no mark for others.
                        print(f"streams: {name} failed: {str(exc.stderr)[-300:]}", file=sys.stderr, flush=True)
                        found[name].failed += 1
    result = {
        "machine": machine(),
        "rows": [row.as_json() for row in rows(found)],
        "routers": {name: _all(one) for name, one in found.items()},
    }
    text = json.dumps(result, indent=1) + "\n"
    printed = options.json == Path("-")
    print(text if printed else table(result["rows"]))
    if options.json and not printed:
        options.json.write_text(text)
    if options.save:
        import router_plot  # it needs matplotlib, which measuring does not

        (RESULTS / "router.json").write_text(text)
        router_plot.draw(result, RESULTS / "router.svg")
        write_table("router", result)


def _all(one: Measured) -> dict[str, Any]:
    """Medians, for people to look at."""
    middle = {
        name: round(statistics.median(getattr(one, name)), 4) for name in ("cpu", "cpu_large", "p50", "p99", "rate")
    }
    more = {"rss": round(one.rss, 1), "failed": one.failed}
    gaps = {str(count): round(gap, 3) for count, gap in one.gaps.items()}
    tokens = {str(count): round(cost, 3) for count, cost in one.cpu_tokens.items()}
    return {**middle, **more, "gap_p99": gaps, "cpu_per_1000_tokens": tokens}


if __name__ == "__main__":
    main()

"""Processes end with their owner, whole trees of them, whatever ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import deeplink
from deeplink.errors import LocalError
from deeplink.local.process import Process, wait_all_ready

# A child that starts a child that starts a child, each in its own session: no signal to a group reaches them.
TREE = """
import os, subprocess, sys, time
depth, folder = int(sys.argv[1]), sys.argv[2]
if depth:
    subprocess.Popen([sys.executable, __file__, str(depth - 1), folder], start_new_session=True)
open(os.path.join(folder, f"pid{depth}"), "w").write(str(os.getpid()))
time.sleep(600)
"""

SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""

OWNER = """
import sys, time
from pathlib import Path
from deeplink.local.process import Process
folder = Path(sys.argv[1])
command = [sys.executable, folder / "tree.py", "2", folder]
Process("tree", command, env={}, log=folder / "log", grace=0.5).start()
time.sleep(600)
"""


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree.py").write_text(TREE)
    return tmp_path


def pids(folder: Path) -> list[int]:
    until(lambda: all((folder / f"pid{depth}").exists() for depth in range(3)))
    until(lambda: all((folder / f"pid{depth}").read_text() for depth in range(3)))
    return [int((folder / f"pid{depth}").read_text()) for depth in range(3)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_stop_ends_the_whole_tree(tree: Path) -> None:
    command = [sys.executable, tree / "tree.py", "2", tree]
    with Process("tree", command, env={}, log=tree / "log", grace=0.5) as process:
        started = pids(tree)
        assert all(alive(pid) for pid in started)
        assert process.poll() is None
    assert not any(alive(pid) for pid in started)
    assert process.poll() == 128 + signal.SIGTERM
    process.stop()  # again: nothing happens


def test_sigkill_of_the_owner_leaves_nothing(tree: Path) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tree)], env=environ)
    started = pids(tree)
    owner.kill()
    owner.wait()
    until(lambda: not any(alive(pid) for pid in started))


def test_sigkill_of_the_supervisor_is_noticed_by_stop(tree: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = Process("sleeper", command, env={}, log=tree / "log")
    process.start()
    assert process._supervisor is not None
    process._supervisor.kill()
    process._supervisor.wait()
    process.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(process._supervisor.pid, 0)


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    process = Process("deaf", [sys.executable, "-c", code], env={}, log=tmp_path / "log", grace=0.3)
    with process:
        until(lambda: "deaf" in process.log_tail())
    assert process.poll() == 128 + signal.SIGKILL


def test_children_end_when_the_command_ends_by_itself(tree: Path) -> None:
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, {str(tree / 'tree.py')!r}, '2', "
        f"{str(tree)!r}]); time.sleep(1.5); sys.exit(3)"
    )
    process = Process("short", [sys.executable, "-c", code], env={}, log=tree / "log")
    with process:
        started = pids(tree)
        until(lambda: process.poll() is not None)
        assert process.poll() == 3
        assert not any(alive(pid) for pid in started)


def test_an_early_end_is_reported_at_once_with_the_log(tmp_path: Path) -> None:
    code = "import sys; print('the reason'); sys.exit(7)"
    url = f"http://127.0.0.1:{free_port()}"
    process = Process("brief", [sys.executable, "-c", code], env={}, log=tmp_path / "log", url=url)
    begin = time.monotonic()
    with process, pytest.raises(LocalError, match=r"(?s)brief ended with status 7.*the reason"):
        process.wait_ready(30)
    assert time.monotonic() - begin < 10


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    process = Process("none", ["/no/such/engine"], env={}, log=tmp_path / "log", url="http://127.0.0.1:1")
    with process, pytest.raises(LocalError, match=r"(?s)status 127.*cannot start /no/such/engine"):
        process.wait_ready(30)


def test_not_ready_in_time(tmp_path: Path) -> None:
    code = "import time; print('loading', flush=True); time.sleep(600)"
    url = f"http://127.0.0.1:{free_port()}"
    process = Process("slow", [sys.executable, "-c", code], env={}, log=tmp_path / "log", url=url)
    with process, pytest.raises(LocalError, match="slow is not ready after 1 s"):
        process.wait_ready(1)


def test_ready_side_by_side_although_a_proxy_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    ports = [free_port(), free_port()]
    first, second = (
        Process(
            str(port),
            [sys.executable, "-c", SERVER, str(port)],
            env={},
            log=tmp_path / str(port),
            url=f"http://127.0.0.1:{port}",
        )
        for port in ports
    )
    with first, second:
        wait_all_ready([first, second], 30)


def test_the_supervisor_runs_alone() -> None:
    """It is run by path, so it must not import the package around it."""
    source = Path(deeplink.__file__).parent / "local" / "launch.py"
    assert "deeplink import" not in source.read_text()
    assert "from deeplink" not in source.read_text()

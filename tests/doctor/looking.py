"""What the tests of the doctor look at, and a doctor in another process that listens."""

from __future__ import annotations

import contextlib
import json
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deeplink.doctor.model import Finding, Section
from deeplink.doctor.subject import Effort, Subject, gather

SECRET = b"a secret of more than 16 bytes"
BASE = 'secret_file = "secret"\n'
SECONDS = 40.0
# A shell's background jobs, and so the tests in one, ignore SIGINT from the start.
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.path[:] = {path!r}; "
    "from deeplink.cli import main; main(prog_name='deeplink')"
)


def look(text: str | None = BASE, *, seconds: float = 20.0) -> Subject:
    """At a deeplink.toml with this text, or without one."""
    if text is not None:
        Path("deeplink.toml").write_text(text)
    return gather(None if text is None else Path("deeplink.toml"), Effort(1 << 20, seconds))


def by_name(section: Section) -> dict[str, Finding]:
    return {finding.name: finding for finding in section.findings}


class Listening:
    """`deeplink doctor --listen --json` as a process."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-c", _PROGRAM.format(path=sys.path), "doctor", "--json", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.address = ""

    def wait(self) -> str:
        """Where it listens."""
        found = re.search(r"listening on (\S+);", self._line())
        assert found is not None
        self.address = found[1]
        return self.address

    def came(self) -> None:
        """Returns when one more doctor was here."""
        assert "was here" in self._line()

    def result(self) -> tuple[int, dict[str, Any]]:
        out, err = self.process.communicate(timeout=SECONDS)
        assert "Traceback" not in err, err
        return self.process.returncode, json.loads(out)

    def _line(self) -> str:
        assert self.process.stderr is not None
        ready, _, _ = select.select([self.process.stderr], [], [], SECONDS)
        assert ready, "the doctor says nothing"
        return self.process.stderr.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def listening(text: str = BASE, *options: str, file: str = "there.toml") -> Iterator[Listening]:
    """Once, at any port of 127.0.0.1, with this deeplink.toml."""
    Path(file).write_text(text)
    made = Listening("--config", file, "--listen", "127.0.0.1:0", "--once", "--size", "1", *options)
    try:
        made.wait()
        yield made
    finally:
        made.end()

"""`deeplink doctor`: what is here, what works, and what would be refused and why.

Exit codes, for scripts: 0 what is configured works, 1 something was refused or failed, 2 it could not be told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.text import Text

from deeplink import config as configs
from deeplink.cli.terminal import NONE, cell, console, printable, table
from deeplink.errors import DeeplinkError, Reason

if TYPE_CHECKING:
    from deeplink.doctor.model import Diagnosis, Finding, Section
    from deeplink.doctor.subject import Subject

UNKNOWN = 2
LISTEN_SECONDS = 3600
DEFAULT = ":8990"
_STYLES = {"works": "green", "off": "dim", "warning": "yellow", "failed": "bold red", "unknown": "bold yellow"}


@click.command("doctor")
@click.option(
    "--config",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"deeplink.toml; default: the file {configs.VARIABLE} names",
)
@click.option("--peer", metavar="ENGINE", help="Ask this engine too, and whether it goes with the others of the file.")
@click.option("--no-canary", is_flag=True, help="With --peer: hand nothing over, only negotiate.")
@click.option("--api", is_flag=True, help="The URL of --peer is that of an OpenAI endpoint.")
@click.option("--peer-host", metavar="HOST[:PORT]", help="Try every transport with the doctor that listens there.")
@click.option(
    "--listen",
    metavar="[HOST:PORT]",
    is_flag=False,
    flag_value=DEFAULT,
    help=f"Listen for a doctor of another host, until Ctrl-C or for an hour.  [default: kv.host{DEFAULT}]",
)
@click.option("--once", is_flag=True, help="With --listen: end after the first doctor that came.")
@click.option(
    "--size",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="MiB that a self-test sends each way; takes twice as much memory.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.1, 600), default=30.0, show_default=True, help="For each of its transfers."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    path: Path | None,
    peer: str | None,
    no_canary: bool,
    api: bool,
    peer_host: str | None,
    listen: str | None,
    once: bool,
    size: int,
    seconds: float,
    as_json: bool,
) -> None:
    """What is here, what works, and what would be refused and why.

    ENGINE is an engine's name in deeplink.toml, the URL of its control endpoint or of its OpenAI endpoint, or a file
    that holds its contract.

    With --peer a prompt is also handed over between that engine and each of the file that agrees with it, and the
    answer compared with those of both alone.

    Exits with 0 when what is configured works, 1 when something was refused or failed, 2 when it could not be told.
    """
    if listen is not None and (peer or peer_host):
        raise click.UsageError("--listen goes with neither --peer nor --peer-host")
    if once and listen is None:
        raise click.UsageError("--once needs --listen")
    with _quiet():
        from deeplink.doctor import canary as canaries
        from deeplink.doctor import examination, link, subject
        from deeplink.doctor import peer as peers
        from deeplink.doctor.model import diagnose

        looked_at = subject.gather(path, subject.Effort(size << 20, seconds))
        if listen is None:
            sections = [section(looked_at) for section in examination.SECTIONS]
            if peer:
                sections.append(peers.examine(looked_at, peer, api))
                if not no_canary:
                    sections.append(canaries.examine(looked_at, peer))
            if peer_host:
                sections.append(link.examine(looked_at, peer_host))
        else:
            sections = _listen(looked_at, listen, once)
        found = diagnose(sections)
    _print(found, as_json)
    sys.exit(found.exit_code)


def _listen(subject: Subject, at: str, once: bool) -> list[Section]:
    """One section for each doctor that came; one that says so when none did."""
    from deeplink.doctor import link
    from deeplink.doctor.model import Finding, Section

    sections: list[Section] = []
    end = time.monotonic() + LISTEN_SECONDS
    try:
        with link.listening(subject, at) as (where, ours, meetings):
            click.echo(f"listening on {where}; on the other host: deeplink doctor --peer-host {where}", err=True)
            while not (once and sections):
                meeting = meetings.get(timeout=max(0.0, end - time.monotonic()))
                sections.append(Section(f"link from {meeting.theirs.host}", tuple(link.findings(meeting, ours))))
                click.echo(printable(f"{meeting.theirs.host} was here"), err=True)
    except (KeyboardInterrupt, queue.Empty):
        pass
    except DeeplinkError as exc:
        sections.append(Section("listen", (Finding("listen", "unknown", reason=exc.reason()),)))
    return sections or [Section("listen", (Finding("listen", "unknown", "no doctor of another host came"),))]


def _print(found: Diagnosis, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found, enc_hook=str), indent=2))
        return
    screen = console()
    for section in found.sections:
        shown = table(section.name, "", "state", "")
        for finding in section.findings:
            shown.add_row(cell(finding.name), Text(finding.standing, _STYLES[finding.standing]), _details(finding))
        screen.print(shown)


def _details(finding: Finding) -> Text:
    text = Text(printable(finding.text))
    if finding.reason is not None:
        text.append(printable(("\n" if finding.text else "") + _said(finding.reason)))
    return text or Text(NONE)


def _said(reason: Reason) -> str:
    lines = [f"{reason.code}: {reason.message}"]
    if reason.field:
        lines.append(f"{reason.field}: ours {reason.ours or NONE}, theirs {reason.theirs or NONE}")
    return "\n".join(lines + ([reason.remedy] if reason.remedy else []))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What goes wrong is in the diagnosis; libraries print to where only that may be."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
        os.dup2(kept, 1)
        os.close(kept)

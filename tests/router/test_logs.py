"""Many lines are one write, and none is lost."""

from __future__ import annotations

import asyncio
import io
import logging
import re

import pytest

from deeplink.router import logs


class Counted(io.StringIO):
    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


@pytest.fixture
def log() -> logging.Logger:
    made = logging.Logger("a.logger")
    made.setLevel(logging.INFO)
    return made


def test_lines_come_soon_and_in_order(log: logging.Logger) -> None:
    stream = Counted()
    lines = logs.Lines(stream)
    log.addHandler(lines)

    async def test() -> None:
        log.info("one %d", 1)
        lines.say("a.logger", "two")
        log.info("three")
        assert not stream.getvalue()
        await asyncio.sleep(3 * logs.SOON)

    asyncio.run(test())
    assert stream.writes == 1
    found = re.findall(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO a\.logger: (.*)$", stream.getvalue())
    assert found == ["one 1", "two", "three"]


def test_a_warning_is_out_at_once_with_all_before_it(log: logging.Logger) -> None:
    stream = Counted()
    log.addHandler(logs.Lines(stream))

    async def test() -> None:
        log.info("before")
        log.warning("look")
        assert [line.split(": ", 1)[1] for line in stream.getvalue().splitlines()] == ["before", "look"]
        try:
            raise KeyError("why")
        except KeyError:
            log.exception("it broke")
        assert "KeyError: 'why'" in stream.getvalue()

    asyncio.run(test())


def test_without_a_loop_and_at_the_end(log: logging.Logger) -> None:
    stream = Counted()
    lines = logs.Lines(stream)
    log.addHandler(lines)
    log.info("before it serves")
    assert "before it serves" in stream.getvalue()

    async def test() -> None:
        log.info("last")

    asyncio.run(test())
    lines.close()
    assert "last" in stream.getvalue()


def test_lines_of_requests_go_past_the_library_only_where_that_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, log: logging.Logger
) -> None:
    heard: list[str] = []

    class Other(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    log.addHandler(Other())
    logs.sayer(log)("kept")
    assert heard == ["kept"]
    stream = Counted()
    lines = logs.Lines(stream)
    monkeypatch.setattr(logging.root, "handlers", [lines])
    quick = logging.getLogger("deeplink.router.test_logs")
    quick.setLevel(logging.INFO)
    logs.sayer(quick)("quick")
    lines.flush()
    assert stream.getvalue().endswith(" INFO deeplink.router.test_logs: quick\n")
    quick.setLevel(logging.WARNING)
    logs.sayer(quick)("nothing")
    lines.flush()
    assert "nothing" not in stream.getvalue()

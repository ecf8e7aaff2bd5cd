"""`deeplink router`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from deeplink.cli import main

from .fake_engine import SECRET, FakeEngine, make_contract, running
from .rig import check


def write(folder: Path, *engines: FakeEngine) -> Path:
    (folder / "secret").write_bytes(SECRET)
    text = f'secret_file = "{folder / "secret"}"\n'
    for engine in engines:
        text += f'[[engines]]\nname = "{engine.name}"\nurl = "{engine.url}"\ncontrol = "{engine.control}"\n'
    path = folder / "deeplink.toml"
    path.write_text(text)
    return path


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    async def test() -> None:
        engine, later = FakeEngine("e", make_contract("both")), FakeEngine("f", make_contract("both"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        async with running(engine, later):
            words = ["router", "--config", str(write(tmp_path, engine)), "--port", str(port)]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                "from deeplink.cli import main; main()",
                *words,
                stdout=subprocess.DEVNULL,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                async with aiohttp.ClientSession() as client:
                    for _ in range(200):
                        try:
                            async with client.get(f"http://127.0.0.1:{port}/health") as response:
                                assert response.status == 200
                                break
                        except aiohttp.ClientConnectorError:
                            await asyncio.sleep(0.05)
                    else:
                        pytest.fail("it does not listen")
                    async with client.post(f"http://127.0.0.1:{port}/v1/completions", json={}) as response:
                        assert response.status == 200
                    write(tmp_path, engine, later)
                    process.send_signal(signal.SIGHUP)
                    for _ in range(100):
                        async with client.get(f"http://127.0.0.1:{port}/health") as response:
                            if set((await response.json())["engines"]) == {"e", "f"}:
                                break
                        await asyncio.sleep(0.05)
                    else:
                        pytest.fail("it does not follow the file")
            finally:
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 10) == 0

    check(test)


def test_it_says_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    result = CliRunner().invoke(main, ["router", "--config", str(path)])
    assert result.exit_code == 1
    assert "no engine is configured" in result.output
    start, end = path.read_text(), "[[engines]]\nname = 'e'\nurl = 'http://h:1'\n"
    path.write_text(f"{start}[router]\nkeys_file = 'none'\n{end}")
    result = CliRunner().invoke(main, ["router", "--config", str(path)])
    assert result.exit_code == 1
    assert "router.keys_file" in result.output
    path.write_text(f"{start}[router]\nprefill_policy = 'best'\n{end}")
    result = CliRunner().invoke(main, ["router", "--config", str(path)])
    assert result.exit_code == 1
    assert "no policy named 'best'" in result.output
    path.write_text("[router]\nport = 'x'\n")
    result = CliRunner().invoke(main, ["router", "--config", str(path)])
    assert result.exit_code == 1
    assert "router.port" in result.output
    result = CliRunner().invoke(main, ["router", "--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 1
    assert "cannot read" in result.output

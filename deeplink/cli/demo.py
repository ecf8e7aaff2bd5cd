"""`deeplink demo`: from nothing to a request that two unlike engines answered together."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from deeplink.errors import DeeplinkError, LocalError
from deeplink.local import demo, measure, report
from deeplink.local.demo import Options, Running
from deeplink.local.kinds import KINDS, common_dtype
from deeplink.local.prompts import PROMPTS, WELCOME

DEFAULT_PORT = 8000
_KIND = click.Choice(list(KINDS))


@click.command(name="demo")
@click.option("--once", is_flag=True, help="Send a few requests, check every one, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: the last line of stdout is one JSON object.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help=f"The router's.  [default: {DEFAULT_PORT}; any with --once]"
)
@click.option("--prefill", type=_KIND, default="vllm", show_default=True, help="The kind of the prefill engine.")
@click.option("--decode", type=_KIND, default="vllm", show_default=True, help="The kind of the decode engine.")
@click.option(
    "--dtype", help="Of both engines' weights and KV cache.  [default: float32; float16 where an engine has no other]"
)
@click.option("--prefill-block", default=64, show_default=True, help="Tokens per KV block of the prefill engine.")
@click.option("--decode-block", default=128, show_default=True, help="Tokens per KV block of the decode engine.")
@click.option("--prefill-version", help="Of the prefill engine.  [default: the newest that deeplink is tested with]")
@click.option("--decode-version", help="Of the decode engine.")
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A Hugging Face model folder.  [default: SmolLM2-135M-Instruct]",
)
def command(
    once: bool,
    as_json: bool,
    port: int | None,
    prefill: str,
    decode: str,
    dtype: str | None,
    prefill_block: int,
    decode_block: int,
    prefill_version: str | None,
    decode_version: str | None,
    model: Path | None,
) -> None:
    """Start a prefill engine, a decode engine and a router here, and hand a KV cache from one to the other.

    The first run makes the engines' environment and the model (minutes); later ones find them in the cache.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    signal.signal(signal.SIGTERM, _end)
    console = _console(stderr=True)
    try:
        options = Options(
            # Any port will do for a run that no one else talks to.
            port=port or (0 if once else DEFAULT_PORT),
            dtype=_dtype(prefill, decode, dtype),
            prefill_block=prefill_block,
            decode_block=decode_block,
            prefill=prefill,
            decode=decode,
            prefill_version=_version(prefill, prefill_version),
            decode_version=_version(decode, decode_version),
            model=model and demo.require_model(model),
        )
        with demo.running(options, lambda line: console.print(f"[dim]{line}[/]", soft_wrap=True)) as stack:
            if once:
                _once(stack, as_json, console)
            else:
                _stay(stack)
    except KeyboardInterrupt:
        console.print("ended")
    except DeeplinkError as exc:
        console.print(f"[bold red]{exc.code}[/]", end=": ")
        console.print(str(exc), markup=False, soft_wrap=True)
        sys.exit(1)


def _version(kind: str, version: str | None) -> str:
    known = list(KINDS[kind].locks)
    if version is not None and version not in known:
        raise click.UsageError(f"{version} of {kind} is not one of {', '.join(known)}")
    return version or known[0]


def _dtype(prefill: str, decode: str, dtype: str | None) -> str:
    for kind in (prefill, decode):
        known = KINDS[kind].dtypes
        if dtype is not None and dtype not in known:
            raise click.UsageError(f"{kind} computes in {' and '.join(known)}, not in {dtype}")
    return dtype or common_dtype(KINDS[prefill], KINDS[decode])


def _once(running: Running, as_json: bool, console: Console) -> None:
    stack = running.stack
    prefill, decode, agreement = measure.agreement(stack)
    judged = []
    for prompt in PROMPTS:
        console.print(f"[dim]request: {prompt.name}[/]")
        judged.append(measure.measure(stack, prompt))
    held = measure.leaks(stack)
    found = report.Report(
        report.engine_facts(prefill),
        report.engine_facts(decode),
        agreement,
        tuple(request.facts for request in judged),
        held,
    )
    tables = console if as_json else _console()
    tables.print(report.engines_table(found.prefill, found.decode, agreement))
    tables.print(report.requests_table(judged))
    if as_json:
        print(report.to_json(found), flush=True)
    if failed := report.failed_checks(agreement, judged, held, found.decode.dtype):
        raise LocalError("the demo's checks failed:\n" + "\n".join(f"  {check}" for check in failed))


def _stay(running: Running) -> None:
    """One request for the eyes, then stay up until Ctrl-C or until a process ends."""
    stack, console = running.stack, _console()
    prefill, decode, agreement = measure.agreement(stack)
    console.print(report.engines_table(report.engine_facts(prefill), report.engine_facts(decode), agreement))
    console.print(f"[bold]{WELCOME.fields['messages'][0]['content']}[/]")
    judged = measure.measure(stack, WELCOME, lambda text: console.out(text, end="", highlight=False))
    console.print()
    console.print(report.requests_table([judged]))
    console.print(_EXAMPLES.format(url=stack.router_url, model=stack.decode.served_name), markup=False)
    while True:
        time.sleep(1)
        running.require_alive()


_EXAMPLES = """
It stays up until Ctrl-C. From another terminal:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  print(client.completions.create(model="{model}", prompt="The capital of France is").choices[0].text)
"""


def _console(stderr: bool = False) -> Console:
    """As wide as the terminal; wide enough for the tables where there is none."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=110)


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like an exit, so that the engines are ended too."""
    sys.exit(128 + number)

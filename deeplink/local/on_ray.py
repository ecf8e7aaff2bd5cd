"""Starts a placement on a Ray cluster: `python -m deeplink.local.on_ray ray.json --secret secret`.

Engines are processes below actors, which Ray puts where their chips are; the router runs here, for it needs none. What
`deeplink emit --format ray` wrote has one address for all nodes, which is replaced by each engine's own once it is
known. All ends with this process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deeplink.errors import DeeplinkError, LocalError
from deeplink.local.process import Process

HOST = "NODE_IP"
SECRET = "SECRET_FILE"
PLACE_SECONDS = 300.0
"""For Ray to find a node for an engine."""
READY_SECONDS = 1800.0
"""For all engines to load their models."""
_POLL_SECONDS = 2.0


class OnNode:
    """One engine on the node that Ray gave it. An actor; it ends the engine when it ends itself."""

    def __init__(self, engine: dict[str, Any], secret: str) -> None:
        import ray.util

        self.host = str(ray.util.get_node_ip_address())
        self._folder = Path(tempfile.mkdtemp(prefix="deeplink-ray-"))
        file = self._folder / "secret"
        file.touch(0o600)
        file.write_text(secret)
        config = engine["config"].replace(HOST, self.host).replace(SECRET, str(file))
        (self._folder / "deeplink.toml").write_text(config)
        self._process = Process(
            engine["name"],
            engine["words"],
            # Ray has put the devices that it handed out into this process's environment.
            env={**os.environ, **engine["variables"]},
            log=self._folder / "engine.log",
            url=f"http://127.0.0.1:{engine['port']}",
            cwd=self._folder,
        )
        self._process.start()

    def address(self) -> str:
        return self.host

    def ready(self) -> bool:
        """Raises LocalError, with the end of its log, when it has ended."""
        return self._process.is_ready()

    def stop(self) -> None:
        self._process.stop()


def run(document: dict[str, Any], secret: Path, folder: Path, once: bool) -> None:
    """Until Ctrl-C, or until the first answer with `once`. Raises LocalError when an engine or the router ends."""
    import ray
    from ray.exceptions import GetTimeoutError

    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False)
    actors: list[Any] = []
    with ExitStack() as ends:
        ends.callback(_stop, ray, actors)
        for engine in document["engines"]:
            made = ray.remote(OnNode).options(num_cpus=0, num_gpus=engine["gpus"], resources=engine["resources"])
            actors.append(made.remote(engine, secret.read_text()))
        try:
            hosts = ray.get([actor.address.remote() for actor in actors], timeout=PLACE_SECONDS)
        except GetTimeoutError as exc:
            raise LocalError(
                f"Ray has not placed all engines after {PLACE_SECONDS:.0f} s",
                remedy="ray status says what is asked for and what there is",
            ) from exc
        config = folder / "deeplink.toml"
        config.write_text(routed(document, hosts, secret))
        _wait(ray, actors)
        router = ends.enter_context(_router(config, folder))
        router.wait_ready(60)
        print(f"ready: {router.url}", flush=True)
        while not once:
            time.sleep(_POLL_SECONDS)
            router.is_ready()
            ray.get([actor.ready.remote() for actor in actors], timeout=60)


def routed(document: dict[str, Any], hosts: list[str], secret: Path) -> str:
    """The router's deeplink.toml, with every engine's address."""
    text: str = document["router"].replace(SECRET, str(secret.resolve()))
    for engine, host in zip(document["engines"], hosts, strict=True):
        text = text.replace(f"http://{HOST}:{engine['port']}", f"http://{host}:{engine['port']}")
    return text


def _wait(ray: Any, actors: list[Any]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not all(ray.get([actor.ready.remote() for actor in actors], timeout=60)):
        if time.monotonic() > deadline:
            raise LocalError(f"not all engines are ready after {READY_SECONDS:.0f} s", remedy="look at the Ray logs")
        time.sleep(_POLL_SECONDS)


def _router(config: Path, folder: Path) -> Process:
    from deeplink import config as configs

    return Process(
        "router",
        [sys.executable, "-m", "deeplink.cli", "router", "--config", config],
        env=dict(os.environ),
        log=folder / "router.log",
        url=f"http://127.0.0.1:{configs.load(config).router.port}",
    )


def _stop(ray: Any, actors: list[Any]) -> None:
    """Engines are told; what does not answer is killed, and its engine's supervisor then ends it."""
    told = [actor.stop.remote() for actor in actors]
    if told:
        ray.wait(told, num_returns=len(told), timeout=60)
    for actor in actors:
        ray.kill(actor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path, help="ray.json, which `deeplink emit --format ray` wrote")
    parser.add_argument("--secret", type=Path, required=True, help="the file with the secret of engines and router")
    parser.add_argument("--once", action="store_true", help="end when everything is ready")
    given = parser.parse_args()
    try:
        run(json.loads(given.document.read_text()), given.secret, given.document.parent, given.once)
    except KeyboardInterrupt:
        pass
    except (DeeplinkError, OSError) as exc:
        sys.exit(f"deeplink on Ray: {exc}")


if __name__ == "__main__":
    main()

"""deeplink.toml, checked once at the edge; everything inside uses the frozen values below."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deeplink.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "DEEPLINK_CONFIG"
CONTROL_OFFSET = 1000
PATHS = ("/v1/*", "/v2/*", "/tokenize", "/detokenize", "/embeddings", "/rerank", "/score", "/classify", "/pooling")
ZMQ = r"^(tcp://[^/\s]+:\d{1,5}|ipc://\S+)?$"
MAX_CHUNK = 256 << 20
"""Bytes. A chunk is announced with 8 bytes of digest per 16 tokens of one head's K or V, all in one frame of the
channel, which is at most 4 MiB. With 32 elements of 2 bytes per token, as small as heads are, the largest chunk has
2 MiB of them.
"""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineEntry(_Strict):
    """One engine the router may use."""

    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]+$", description="how it is called in headers, logs and errors")
    url: str = Field(pattern=r"^https?://[^/\s]+$", description="the engine's OpenAI endpoint")
    control: str = Field(
        default="",
        pattern=r"^(https?://[^/\s]+)?$",
        description=f"the engine's control endpoint; default: same host, port + {CONTROL_OFFSET}",
    )
    kind: Annotated[
        str,
        Field(pattern=r"^[a-z0-9-]+$", description="deeplink, plain (serves alone), or one that a plugin has"),
    ] = "deeplink"
    role: Annotated[
        Literal["prefill", "decode", "both", ""], Field(description="of kinds that do not say it themselves")
    ] = ""
    settings: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(min_length=1, max_length=256)]],
        Field(max_length=64, description="of kinds without a contract: what must be equal for two to hand over"),
    ] = {}
    bootstrap: Annotated[
        str, Field(pattern=r"^([^/\s@]+:\d{1,5})?$", description="host:port where a prefill engine's kind is looked up")
    ] = ""
    rank: Annotated[int | None, Field(ge=0, le=65535, description="which data-parallel rank behind the URL")] = None
    events: Annotated[str, Field(pattern=ZMQ, description="where the engine publishes its cache events")] = ""
    replay: Annotated[str, Field(pattern=ZMQ, description="where it can be asked for those that were missed")] = ""
    weight: Annotated[float, Field(gt=0, description="its share of the work, relative to the others'")] = 1.0

    @field_validator("url", "control")
    @classmethod
    def _real_port(cls, value: str) -> str:
        if urlsplit(value).port == 0:  # raises ValueError itself for what is no port at all
            raise ValueError("port 0 is not a port to connect to")
        return value

    @model_validator(mode="after")
    def _fill_control(self) -> EngineEntry:
        if not self.control:
            object.__setattr__(self, "control", control_url(self.url, self.rank))
        return self


class RouteEntry(_Strict):
    """Where a placement sends a part of the requests of some lengths. Without any, all engines are for all requests."""

    up_to: Annotated[
        int | None, Field(ge=1, description="the longest prompt, in estimated tokens, that it is for; default: any")
    ] = None
    prefill: Annotated[tuple[str, ...], Field(min_length=1, description="names of the engines that prefill")]
    decode: Annotated[
        tuple[str, ...], Field(min_length=1, description="those that decode; the same where each does all of a request")
    ]
    weight: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="its share of these requests, relative to the other routes'"),
    ] = 1.0


class RouterTlsSection(_Strict):
    """PEM files; relative paths are taken from where the process runs."""

    certificate: Annotated[Path, Field(description="the router's certificate, and what leads to the CA")]
    key: Annotated[Path, Field(description="its private key, not encrypted")]


class RouterSection(_Strict):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    workers: Annotated[
        int,
        Field(ge=1, le=256, description="processes that serve; beside several, one owns the state"),
    ] = 1
    prefill_policy: Annotated[str, Field(description="which engine prefills")] = "least_load"
    decode_policy: Annotated[str, Field(description="which engine decodes, or does all of a request")] = "least_load"
    dispatch: Annotated[
        Literal["auto", "sequential", "together"],
        Field(description="when decode is asked: as soon as there is something to fetch, after prefill, or at once"),
    ] = "auto"
    min_prefill: Annotated[
        int, Field(ge=0, description="shorter prompts, in estimated tokens, are not handed over; 0: all are")
    ] = 0
    retries: Annotated[int, Field(ge=0, le=10, description="further tries before the first byte of an answer")] = 2
    kv_limit: Annotated[
        float, Field(gt=0, description="part of its KV memory in use at which an engine gets no new requests")
    ] = 0.9
    max_requests: Annotated[int, Field(ge=0, description="most requests at one engine; 0: no limit")] = 0
    queue: Annotated[int, Field(ge=0, description="most requests that wait while all engines are full")] = 256
    queue_seconds: Annotated[float, Field(gt=0, description="how long one waits")] = 10.0
    breaker_failures: Annotated[
        int, Field(ge=1, description="failures in a row after which an engine gets no requests for a while")
    ] = 5
    breaker_seconds: Annotated[float, Field(gt=0, description="that while; twice as long each time, up to 60")] = 2.0
    session_header: Annotated[str, Field(description="the header that names a client's session")] = "x-session-id"
    keys_file: Annotated[Path | None, Field(description="keys for inference, one a line; without: none needed")] = None
    admin_keys_file: Annotated[Path | None, Field(description="keys for the admin API; without: there is none")] = None
    paths: Annotated[
        tuple[str, ...], Field(description="other paths that pass to engines; * stands for any characters")
    ] = PATHS
    tls: RouterTlsSection | None = None
    max_connections: Annotated[int, Field(ge=1, description="most connections of clients at a time")] = 4096
    header_seconds: Annotated[float, Field(gt=0, description="for the head of a request")] = 10.0
    deadline: Annotated[float, Field(gt=0, description="seconds from the choice to the KV being loaded")] = 120.0
    max_body: Annotated[int, Field(gt=0, description="largest request body, bytes")] = 32 << 20
    poll: Annotated[float, Field(gt=0, description="seconds between looks at each engine's contract")] = 1.0
    tracing: Annotated[bool, Field(description="spans to OpenTelemetry, by its own environment variables")] = False
    redis: Annotated[
        str, Field(pattern=r"^((redis|rediss|unix)://\S+)?$", description="what several routers share is kept there")
    ] = ""


class TlsSection(_Strict):
    """PEM files; relative paths are taken from where the process runs."""

    certificate: Annotated[Path, Field(description="this engine's certificate, and what leads to the CA")]
    key: Annotated[Path, Field(description="its private key, not encrypted")]
    ca: Annotated[Path, Field(description="the CA that signed every engine's certificate")]


class KVSection(_Strict):
    host: Annotated[str, Field(description="address peers reach this engine at")] = "127.0.0.1"
    staging: Annotated[int, Field(gt=0, description="staging memory, bytes, per direction")] = 256 << 20
    chunk: Annotated[int, Field(gt=0, le=MAX_CHUNK, description="largest chunk of one push, bytes")] = 8 << 20
    digest: Annotated[
        Literal["always", "sampled", "off"],
        Field(description="of the decode engine: verify a digest of every tile, or of one in 8, before it is loaded"),
    ] = "always"
    on_failure: Annotated[
        Literal["fail", "recompute"],
        Field(description="of the decode engine: whether a request whose cache does not arrive fails or is prefilled"),
    ] = "fail"
    casts: Annotated[
        tuple[Annotated[str, Field(pattern=r"^(\*|[a-z0-9_]+)->[a-z0-9_]+$")], ...],
        Field(description='lossy casts consented to, such as "bfloat16->float16" or "*->float16"'),
    ] = ()
    streams: Annotated[int, Field(ge=0, le=16, description="connections per link of tcp; 0: as many as help")] = 0
    foreign_seconds: Annotated[
        float,
        Field(ge=0, le=86400, description="how long a handoff may take that another router paired; 0: it is refused"),
    ] = 0.0
    tls: TlsSection | None = None
    trust: Annotated[
        Literal["peers", "fabric"],
        Field(description="fabric: also use transports that cannot authenticate; whoever is on the network is trusted"),
    ] = "peers"


class RegistrationSection(_Strict):
    """How an engine tells a router that it is there. Without a router it does not."""

    router: Annotated[str, Field(pattern=r"^(https?://[^/\s]+/?)?$", description="the router's URL")] = ""
    name: Annotated[
        str, Field(pattern=r"^[^\x00-\x1f\x7f]*$", description="what this engine is called; default: its address")
    ] = ""
    url: Annotated[
        str, Field(pattern=r"^(https?://[^/\s]+)?$", description="where the router reaches this engine's API")
    ] = ""


class Config(_Strict):
    secret_file: Path | None = None
    router: RouterSection = RouterSection()
    kv: KVSection = KVSection()
    registration: RegistrationSection = RegistrationSection()
    engines: tuple[EngineEntry, ...] = ()
    routes: tuple[RouteEntry, ...] = ()

    @model_validator(mode="after")
    def _unique_names(self) -> Config:
        names = [engine.name for engine in self.engines]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"engine name used twice: {', '.join(twice)}")
        for index, route in enumerate(self.routes):
            if unknown := sorted({*route.prefill, *route.decode}.difference(names)):
                raise ValueError(f"routes[{index}] names an engine that is not listed: {', '.join(unknown)}")
        return self


def control_url(url: str, rank: int | None = None) -> str:
    """Where an engine's control endpoint is by convention: the API port plus 1000, plus its data-parallel rank. Raises
    ValueError for a rank that has no port."""
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rpartition(":") if ":" in rest.rsplit("]", 1)[-1] else (rest, "", "")
    first = control_port(int(port or (443 if scheme == "https" else 80)))
    return f"{scheme}://{host}:{replica_port(first, rank)}"


def control_port(api_port: int) -> int:
    """API port + 1000; past the end of the range it counts down instead, so it never wraps to a system port."""
    return api_port + CONTROL_OFFSET if api_port + CONTROL_OFFSET <= 65535 else api_port - CONTROL_OFFSET


def parse_port(text: str, field: str) -> int:
    """A port as `field` states it; 0 is any. Raises ConfigError."""
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise ConfigError(f"{field} is not a port", field=field, ours=text[:100])
    return int(text)


def replica_port(first: int, rank: int | None) -> int:
    """The control port of a data-parallel rank: they follow each other from `first` on. Raises ValueError for a rank
    that has none."""
    port = first + (rank or 0)
    if port > 65535:
        raise ValueError(f"the control port of data-parallel rank {rank} would be {port}")
    return port


def load(path: str | os.PathLike[str] | None = None) -> Config:
    """Read `path`, or the file DEEPLINK_CONFIG names; without either, the defaults."""
    path = path or os.environ.get(VARIABLE)
    if not path:
        return Config()
    try:
        data = tomllib.loads(Path(path).read_text())
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{path} is not TOML: {exc}") from exc
    return parse(data, str(path))


def parse(data: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{source}: {first['msg']}",
            field=field,
            ours=repr(first["input"])[:200],
            remedy="see docs/config.md",
        ) from exc

"""Where the application keeps its parts, for the handlers of every module."""

from __future__ import annotations

from aiohttp import web

from deeplink.config import Config
from deeplink.router.admission import Admission
from deeplink.router.api import Api
from deeplink.router.fleet import Fleet
from deeplink.router.listed import Listed
from deeplink.router.metrics import Metrics
from deeplink.router.recent import Recent
from deeplink.router.registered import Registered
from deeplink.router.shared import Shared
from deeplink.router.tracing import Spans

API = web.AppKey("api", Api)
CONFIG = web.AppKey("config", Config)
FLEET = web.AppKey("fleet", Fleet)
ADMISSION = web.AppKey("admission", Admission)
LISTED = web.AppKey("listed", Listed)
METRICS = web.AppKey("metrics", Metrics)
RECENT = web.AppKey("recent", Recent)
REGISTERED = web.AppKey("registered", Registered)
SHARED = web.AppKey("shared", Shared)
SPANS = web.AppKey("spans", Spans)

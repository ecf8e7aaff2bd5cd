"""Reading what engines say of themselves: small JSON documents and metrics of engines that are not trusted. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from deeplink.errors import ProtocolError

MAX_VALUE = 256


def document(url: str, status: int, data: bytes, limit: int) -> Any:
    """The JSON value that `url` answered with. Raises ProtocolError, by what is wrong with it."""
    if status != 200:
        raise ProtocolError(f"{url} answered {status}", field="status", theirs=str(status))
    if len(data) > limit:
        raise ProtocolError(f"{url} answered with more than {limit} bytes", field="body", theirs=f"over {limit} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{url} did not answer with JSON", field="body") from exc


def text(value: Any) -> str:
    """One setting as text; "" if the engine does not say it in a form that two can be compared by."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)[:MAX_VALUE] if isinstance(value, (str, int, float)) else ""


def label(metrics: bytes, metric: str, name: str) -> str:
    """One label of the first sample of an info metric in Prometheus' text form; "" if it is not there."""
    line = re.search(rb"(?m)^" + re.escape(metric.encode()) + rb"\{([^\n]{0,8192}?)\} ", metrics)
    if line is None:
        return ""
    found = re.search(rb"(?:^|,)\s*" + re.escape(name.encode()) + rb'="([^"\n]{0,256})"', line[1])
    return found[1].decode(errors="replace") if found else ""

"""Every error deeplink raises on purpose.

    DeeplinkError
    ├── ConfigError               the file or a flag is wrong
    ├── PluginError               a plugin could not be loaded, or two use one name
    │   └── UnsupportedOperator   a vendor has no such operator, or not for what it was called with
    ├── LayoutError               a layout text, or a cache that is not what its layout says
    ├── Refused                   two sides do not mean the same; names the field
    │   ├── TicketRefused         a ticket is forged, expired, replayed, or for another incarnation
    │   └── CastRefused           a value of the cache does not fit the other side's element type
    ├── HandoffError              a handoff that had begun did not end well
    │   ├── PeerGone              the connection to the peer broke or was never there
    │   │   └── LinkLost          nothing is heard of the peer any more, which may be the link
    │   ├── DeadlineExceeded      the ticket's time ran out
    │   ├── DigestMismatch        the bytes that arrived are not the bytes that were staged
    │   ├── Corrupted             a link changed bytes on their way; none of them was acknowledged
    │   ├── ProtocolError         the peer sent what the wire format does not allow
    │   └── Aborted               one side gave the request up
    ├── RouteError                the router could not serve a request
    │   ├── InvalidRequest        the client's body is not what the API takes
    │   │   └── RequestTooLarge
    │   ├── Unauthorized          the request has no key that opens what it asks for
    │   ├── NoEngine              nothing that can take it is up
    │   ├── Overloaded            all that could take it are full, and so is the queue
    │   ├── PrefillFailed
    │   └── DecodeFailed
    ├── SolverError               no placement could be made of what was asked
    │   ├── FleetError            the description of the fleet is wrong; names the line and the field
    │   └── RateError             a measured rate is missing, malformed or faster than its chip can be
    └── LocalError                an environment, model or process could not be made, run or reached from here

An error says what failed, which peer, which field, both values, and the next step. `code` is what clients and
metrics see; it never changes once released. `Reason` is the same as plain data, for the wire.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why something was refused or failed, as sent between engines and to the router."""

    code: str
    message: str
    field: str = ""
    ours: str = ""
    theirs: str = ""
    remedy: str = ""


class DeeplinkError(Exception):
    """Root of the tree. Subclasses set `code` and the HTTP `status` the router answers with."""

    code: ClassVar[str] = "deeplink_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, field: str = "", ours: str = "", theirs: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.ours = ours
        self.theirs = theirs
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.message]
        if self.field:
            parts.append(f"field {self.field}: ours {self.ours or '-'}, theirs {self.theirs or '-'}")
        if self.remedy:
            parts.append(self.remedy)
        return "; ".join(parts)

    def reason(self) -> Reason:
        return Reason(self.code, self.message, self.field, self.ours, self.theirs, self.remedy)

    @staticmethod
    def from_reason(reason: Reason) -> DeeplinkError:
        """The error a peer reported, as the type it raised there (unknown codes become `HandoffError`)."""
        kind = _BY_CODE.get(reason.code, HandoffError)
        return kind(reason.message, field=reason.field, ours=reason.ours, theirs=reason.theirs, remedy=reason.remedy)


class ConfigError(DeeplinkError):
    code = "config_error"


class PluginError(DeeplinkError):
    code = "plugin_error"


class UnsupportedOperator(PluginError):
    code = "unsupported_operator"


class LayoutError(DeeplinkError):
    code = "layout_error"


class Refused(DeeplinkError):
    code = "contract_refused"
    status = 503


class TicketRefused(Refused):
    code = "ticket_refused"


class CastRefused(Refused):
    code = "cast_refused"
    status = 502


class HandoffError(DeeplinkError):
    code = "handoff_failed"
    status = 502


class PeerGone(HandoffError):
    code = "peer_gone"


class LinkLost(PeerGone):
    code = "link_lost"


class DeadlineExceeded(HandoffError):
    code = "deadline_exceeded"
    status = 504


class DigestMismatch(HandoffError):
    code = "digest_mismatch"


class Corrupted(HandoffError):
    code = "corrupted"


class ProtocolError(HandoffError):
    code = "protocol_error"


class Aborted(HandoffError):
    code = "aborted"


class RouteError(DeeplinkError):
    code = "route_error"
    status = 502


class InvalidRequest(RouteError):
    code = "invalid_request"
    status = 400


class RequestTooLarge(InvalidRequest):
    code = "request_too_large"
    status = 413


class NoEngine(RouteError):
    code = "no_engine"
    status = 503


class Unauthorized(RouteError):
    code = "unauthorized"
    status = 401


class Overloaded(RouteError):
    code = "overloaded"
    status = 429


class PrefillFailed(RouteError):
    code = "prefill_failed"


class DecodeFailed(RouteError):
    code = "decode_failed"


class SolverError(DeeplinkError):
    code = "solver_error"


class FleetError(SolverError):
    """`line` is where in the file, counted from 1; 0 where it is not known."""

    code = "fleet_error"

    def __init__(
        self, message: str, *, field: str = "", ours: str = "", theirs: str = "", remedy: str = "", line: int = 0
    ) -> None:
        super().__init__(message, field=field, ours=ours, theirs=theirs, remedy=remedy)
        self.line = line


class RateError(SolverError):
    code = "rate_error"


class LocalError(DeeplinkError):
    code = "local_error"


def _tree(kind: type[DeeplinkError]) -> dict[str, type[DeeplinkError]]:
    found = {kind.code: kind}
    for sub in kind.__subclasses__():
        found |= _tree(sub)
    return found


_BY_CODE = _tree(DeeplinkError)

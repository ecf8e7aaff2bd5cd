"""Staging that a peer may still write to, kept out of use until it is known that it does not."""

from __future__ import annotations

import logging
import threading

from deeplink.errors import DeadlineExceeded
from deeplink.kvconnector.transport.base import Region
from deeplink.kvconnector.transport.staging import Piece, Staging

log = logging.getLogger(__name__)


class Quarantine:
    """Pieces whose regions could not be withdrawn. Only transports that are not `revocable` have such.

    They are the one thing that can be held past a handoff's deadline: for as long as a peer that is frozen in the
    middle of a write may wake and go on with it.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._held: list[tuple[Region | None, Piece]] = []
        self._lock = threading.Lock()

    def let_go(self, region: Region | None, piece: Piece | None) -> None:
        """Withdraw the region and give the piece back to staging, now or when it is safe."""
        try:
            if region is not None:
                region.withdraw()
        except DeadlineExceeded as exc:
            log.warning("deeplink keeps staging out of use: %s", exc)
            if piece is not None:
                with self._lock:
                    self._held.append((region, piece))
            return
        if piece is not None:
            self._staging.release(piece)

    def retry(self) -> None:
        """Try once more to free what is held. May take seconds where something is."""
        with self._lock:
            held, self._held = self._held, []
        for region, piece in held:
            self.let_go(region, piece)

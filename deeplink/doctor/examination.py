"""The sections of a diagnosis, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable

from deeplink.doctor import chips, engines, installation, transports
from deeplink.doctor.model import Section
from deeplink.doctor.subject import Subject

SECTIONS: tuple[Callable[[Subject], Section], ...] = (
    installation.examine,
    chips.examine,
    engines.examine,
    transports.examine,
)

"""Named things that plugins register, and the errors for a name taken twice or not known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from deeplink.errors import PluginError

T = TypeVar("T")


@dataclass(slots=True)
class Registry(Generic[T]):
    """What plugins registered under one hook. Filled once at start, read-only after."""

    kind: str
    items: dict[str, T] = field(default_factory=dict)

    def register(self, name: str, value: T) -> None:
        if name in self.items:
            raise PluginError(
                f"{self.kind} {name!r} is registered twice",
                field="name",
                ours=repr(self.items[name]),
                theirs=repr(value),
                remedy="remove one of the two plugins or exclude it with DEEPLINK_DISABLE_PLUGINS",
            )
        self.items[name] = value

    def get(self, name: str) -> T:
        if name not in self.items:
            known = ", ".join(sorted(self.items)) or "none"
            raise PluginError(f"no {self.kind} named {name!r} (known: {known})")
        return self.items[name]

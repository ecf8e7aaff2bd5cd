"""Whether two engines without contracts may hand over: by what they say of themselves and what operators declare. Pure.

Their own protocols check little or nothing, and what they do not check becomes wrong tokens. So every setting that
either of the two has must be there on both sides, and equal.
"""

from __future__ import annotations

from collections.abc import Mapping

from deeplink.kvconnector.contracts.negotiate import Refusal
from deeplink.router.engine import Engine


def settings(engine: Engine) -> Mapping[str, str]:
    """What the operator declares goes before what the engine says."""
    return {**(engine.said.settings if engine.said else {}), **engine.settings}


def refusal(producer: Engine, consumer: Engine) -> Refusal | None:
    """The first setting that differs or that one of them does not have; None if the two agree."""
    ours, theirs = settings(producer), settings(consumer)
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name, ""), theirs.get(name, "")
        if not one or not other:
            missing = " and ".join(engine.name for engine, value in ((producer, one), (consumer, other)) if not value)
            return Refusal(
                f"settings.{name}",
                one or "not known",
                other or "not known",
                f"declare it for {missing} in deeplink.toml, under engines[].settings",
            )
        if one != other:
            return Refusal(f"settings.{name}", one, other, "start both engines with the same")
    return None

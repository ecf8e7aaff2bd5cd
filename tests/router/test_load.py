"""What engines have been given, and for how long that is remembered."""

from __future__ import annotations

from deeplink.router.load import Load


def test_an_engine_that_has_gone_is_forgotten_once_it_has_nothing_left_to_do() -> None:
    """Names come and go: a fleet that engines register with would grow for ever."""
    load = Load()
    hold = load.take("a", prefill=3, decode=4)
    load.of("b").seconds = 1.0
    load.of("c").seconds = 2.0
    load.keep({"c"})
    assert load.all("a") == (3, 4, 1)
    assert load.of("b").seconds == 0.0
    assert load.of("c").seconds == 2.0
    hold.end(well=True)
    assert load.all("a") == (0, 0, 0)
    load.keep({"c"})
    assert load.of("a").seconds == 0.0
    assert load.idle

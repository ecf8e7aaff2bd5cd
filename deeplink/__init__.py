"""deeplink: one LLM request across unlike accelerators.

Here lies what every part shares; it imports no torch, no engine and no web stack:

    hookspecs  what plugins can be asked for; plugins  finding them; registry  named things that they register
    chips      chip profiles and detection
    errors     every error that is raised on purpose
    config     deeplink.toml; secret  what engines and router share; lookup  an engine as an operator names it
    bounded    an HTTP answer within a size and a time

And the commands, each on the parts that it is about:

    cli        `deeplink …`
    doctor     what is here, what works; measure  a running engine as a table of rates; bench  this machine
    local      engines and a router as processes of this machine
    testing    suites for authors of plugins

The parts themselves, `kvconnector`, `router` and `solver`, are folders beside this one.
"""

from deeplink.hookspecs import hookimpl

__all__ = ["__version__", "hookimpl"]
__version__ = "0.1.0"

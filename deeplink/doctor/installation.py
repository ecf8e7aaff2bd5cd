"""deeplink itself: version, configuration, secret, plugins."""

from __future__ import annotations

import platform
import stat
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from deeplink import __version__
from deeplink import plugins as plugin
from deeplink import secret as secrets
from deeplink.config import VARIABLE, Config
from deeplink.doctor.model import Finding, Section, reason_of
from deeplink.doctor.subject import Subject
from deeplink.errors import ConfigError, DeeplinkError
from deeplink.plugins import Plugins


def examine(subject: Subject) -> Section:
    return Section("deeplink", tuple(_findings(subject)))


def _findings(subject: Subject) -> Iterator[Finding]:
    yield Finding("version", "works", __version__)
    yield Finding("python", "works", f"{platform.python_version()} ({sys.executable})")
    source = subject.source or f"the defaults; no --config, and {VARIABLE} is not set"
    facts = {"file": subject.source or None}
    if isinstance(subject.config, DeeplinkError):
        yield Finding("config", "unknown", source, reason_of(subject.config), facts)
    else:
        yield Finding("config", "works", source, facts=facts)
        yield _secret(subject.config)
    if isinstance(subject.plugins, DeeplinkError):
        yield Finding("plugins", "failed", reason=reason_of(subject.plugins))
    else:
        yield from _plugins(subject.plugins, {ep.name: ep for ep in entry_points(group=plugin.GROUP)})


def _secret(config: Config) -> Finding:
    """Read, and never shown."""
    path = config.secret_file or secrets.default_path()
    facts = {"file": str(path)}
    if config.secret_file is None and not path.exists():
        return Finding("secret", "off", f"none yet; the first engine on this host makes {path}", facts=facts)
    try:
        secrets.load(path)
    except ConfigError as exc:
        return Finding("secret", "unknown", str(path), reason_of(exc, "name another with secret_file"), facts)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        problem = ConfigError(
            "others than its owner may use the secret file",
            field="secret_file",
            ours=f"mode {mode:04o}",
            theirs="mode 0600",
            remedy=f"chmod 600 {path}",
        )
        return Finding("secret", "warning", str(path), reason_of(problem), facts)
    return Finding("secret", "works", f"from {path}", facts=facts)


def _plugins(plugins: Plugins, available: dict[str, EntryPoint]) -> Iterator[Finding]:
    loaded = {name: available.get(name) for name, _ in plugins.manager.list_name_plugin()}
    facts = [_facts(name, ep) for name, ep in sorted(loaded.items()) if name not in plugins.failed]
    yield Finding("plugins", "works", ", ".join(fact["name"] for fact in facts) or "none", facts={"loaded": facts})
    for name, problem in plugins.failed.items():
        ep = available.get(name)
        distribution = _facts(name, ep)["distribution"]
        reason = reason_of(
            problem,
            f"install what it needs, upgrade or uninstall {distribution or 'its distribution'}, "
            f"or leave it out with {plugin.DISABLE}={name}",
        )
        text = f"{ep.value if ep is not None else name} of {distribution or 'an unknown distribution'} does not load"
        yield Finding(f"plugin {name}", "failed", text, reason, _facts(name, ep))
    if skipped := sorted(set(available) - set(loaded) - set(plugins.failed)):
        text = f"{', '.join(skipped)}; left out by {plugin.ONLY} or {plugin.DISABLE}"
        yield Finding("plugins left out", "off", text, facts={"names": skipped})


def _facts(name: str, ep: EntryPoint | None) -> dict[str, Any]:
    found = ep.dist if ep is not None else None
    return {
        "name": name,
        "module": ep.value if ep is not None else None,
        "distribution": f"{found.name} {found.version}" if found is not None else None,
    }

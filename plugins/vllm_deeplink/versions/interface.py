"""vLLM's interface as its sources state it: classes with their methods, parameters and attributes.

It is read from the text and nothing is imported, so the same description comes from a running engine's own folder, from
a wheel that is not installed, and from a build whose compiled parts do not load here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LARGEST = 4 << 20
"""Bytes of a source file that is read; vLLM's largest has a tenth of this."""


@dataclass(frozen=True, slots=True)
class Method:
    """`parameters` are as written, without self or cls: ``name``, ``name=`` with a default, ``*name``, ``**name``."""

    parameters: tuple[str, ...]
    abstract: bool = False

    def accepts(self, given: Iterable[str]) -> bool:
        """Whether a call that names exactly `given` is one that this method takes."""
        names = set(given)
        plain = {text.rstrip("=") for text in self.parameters if not text.startswith("*")}
        needed = {text for text in self.parameters if text[0] != "*" and text[-1] != "="}
        anything = any(text.startswith("**") for text in self.parameters)
        return needed <= names and (anything or names <= plain)

    def __str__(self) -> str:
        return f"({', '.join(self.parameters)})"


@dataclass(frozen=True, slots=True)
class Described:
    """One class: its own methods and attributes, and the names of its bases."""

    bases: tuple[str, ...] = ()
    methods: Mapping[str, Method] = field(default_factory=dict)
    attributes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Interface:
    """Of vLLM `version`: classes by ``path/of/module.py:Class``; a module's functions are the methods of ``path:``."""

    version: str
    classes: Mapping[str, Described]

    def method(self, where: str, name: str) -> Method | None:
        """The method as the class, or a base of it in the same module, has it."""
        for described in self._with_bases(where):
            if name in described.methods:
                return described.methods[name]
        return None

    def has(self, where: str, name: str) -> bool:
        return any(name in described.attributes or name in described.methods for described in self._with_bases(where))

    def abstract(self, where: str) -> set[str]:
        """The methods that a subclass has to have."""
        return {name for name, method in self.classes[where].methods.items() if method.abstract}

    def _with_bases(self, where: str) -> Iterable[Described]:
        module = where.partition(":")[0]
        waiting, seen = [where], set()
        while waiting:
            name = waiting.pop(0)
            if name in seen or name not in self.classes:
                continue
            seen.add(name)
            yield self.classes[name]
            waiting += [f"{module}:{base}" for base in self.classes[name].bases]


def read(folder: Path, version: str, places: Iterable[str]) -> Interface:
    """Describe `places` (``path/of/module.py:Class``) and their bases, in the vLLM package at `folder`.

    What is not there is left out.
    """
    classes: dict[str, Described] = {}
    wanted: dict[str, set[str]] = {}
    for place in places:
        module, _, name = place.partition(":")
        wanted.setdefault(module, set()).add(name)
    for module, names in wanted.items():
        source = folder / module
        if source.is_file() and source.stat().st_size <= LARGEST:
            classes |= {f"{module}:{name}": described for name, described in _module(source.read_text(), names).items()}
    return Interface(version, classes)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (0, 32, 0) of 0.32.0rc1+cpu; empty where there is none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _module(text: str, names: set[str]) -> dict[str, Described]:
    tree = ast.parse(text)
    there = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found: dict[str, Described] = {}
    waiting = sorted(names & there.keys())
    while waiting:
        name = waiting.pop()
        found[name] = _class(there[name])
        waiting += [base for base in found[name].bases if base in there and base not in found]
    if "" in names:
        functions = {node.name: _method(node, bound=False) for node in tree.body if isinstance(node, ast.FunctionDef)}
        found[""] = Described(methods=functions)
    return found


def _class(node: ast.ClassDef) -> Described:
    methods: dict[str, Method] = {}
    attributes: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            if "overload" in _decorators(child):
                continue
            if {"property", "cached_property"} & _decorators(child):
                attributes.add(child.name)
            else:
                methods[child.name] = _method(child, bound="staticmethod" not in _decorators(child))
            if child.name == "__init__":
                attributes |= _assigned_to_self(child)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            attributes.add(child.target.id)
        elif isinstance(child, ast.Assign):
            attributes |= {target.id for target in child.targets if isinstance(target, ast.Name)}
    bases = tuple(_last(base) for base in node.bases)
    return Described(tuple(filter(None, bases)), methods, frozenset(attributes))


def _assigned_to_self(function: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _method(function: ast.FunctionDef, *, bound: bool) -> Method:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    texts = [arg.arg + ("=" if default else "") for arg, default in zip(positional, defaults, strict=True)]
    if given.vararg:
        texts.append(f"*{given.vararg.arg}")
    texts += [
        arg.arg + ("=" if default else "") for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        texts.append(f"**{given.kwarg.arg}")
    return Method(tuple(texts[1:] if bound else texts), "abstractmethod" in _decorators(function))


def _decorators(function: ast.FunctionDef) -> set[str]:
    return {_last(node) for node in function.decorator_list}


def _last(node: ast.expr) -> str:
    """The last word of a dotted name; a subscript's or call's is that of what is subscripted or called."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    if isinstance(node, ast.Call):
        return _last(node.func)
    return ""

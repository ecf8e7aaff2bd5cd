"""Reading classes from source text."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_deeplink.versions import interface
from vllm_deeplink.versions.interface import Described, Method

SOURCE = """
import enum
from abc import ABC, abstractmethod
from typing import overload

raise RuntimeError("never imported")

class Root(ABC):
    a: int
    b = 1

    def __init__(self, x, y=1, *more, z, w=2, **others):
        self.c, self.d = x, y
        if x:
            self.e: int = x
        x.f = 3

    @property
    def g(self): ...

    @abstractmethod
    def must(self, p): ...

    @staticmethod
    def free(p, q=None): ...

    @classmethod
    def made(cls, /, p): ...

class Leaf(Root, elsewhere.Other[int]):
    def own(self): ...
    @overload
    def many(self, x): ...
    @overload
    def many(self): ...
    def many(self, x=None): ...

class Unwanted: ...

def function(p, q=1): ...
"""


@pytest.fixture
def found(tmp_path: Path) -> interface.Interface:
    (tmp_path / "m.py").write_text(SOURCE)
    return interface.read(tmp_path, "1.2", ["m.py:Leaf", "m.py:", "m.py:Nowhere", "nowhere.py:Leaf"])


def test_classes_with_their_bases(found: interface.Interface) -> None:
    assert found.classes.keys() == {"m.py:Leaf", "m.py:Root", "m.py:"}
    assert found.classes["m.py:Leaf"].bases == ("Root", "Other")


def test_methods(found: interface.Interface) -> None:
    assert found.method("m.py:Leaf", "__init__") == Method(("x", "y=", "*more", "z", "w=", "**others"))
    assert found.method("m.py:Leaf", "must") == Method(("p",), abstract=True)
    assert found.method("m.py:Leaf", "free") == Method(("p", "q="))
    assert found.method("m.py:Leaf", "made") == Method(("p",))
    assert found.method("m.py:Leaf", "many") == Method(("x=",))
    assert found.method("m.py:", "function") == Method(("p", "q="))
    assert found.method("m.py:Leaf", "nothing") is None
    assert found.method("m.py:Nowhere", "nothing") is None
    assert found.abstract("m.py:Root") == {"must"}


def test_attributes(found: interface.Interface) -> None:
    assert found.classes["m.py:Root"].attributes == set("abcdeg")
    assert found.has("m.py:Leaf", "e")
    assert not found.has("m.py:Leaf", "f")


def test_bases_in_a_circle_end(found: interface.Interface) -> None:
    circle = interface.Interface("1", {"m:A": Described(("B",)), "m:B": Described(("A",))})
    assert not circle.has("m:A", "x")


@pytest.mark.parametrize(
    ("parameters", "given", "accepted"),
    [
        (("a", "b="), "a", True),
        (("a", "b="), "ab", True),
        (("a", "b="), "b", False),
        (("a",), "ab", False),
        (("a", "**more"), "ab", True),
        (("a", "*more"), "ab", False),
        ((), "", True),
    ],
)
def test_calls(parameters: tuple[str, ...], given: str, accepted: bool) -> None:
    assert Method(parameters).accepts(given) is accepted


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.32.0", (0, 32, 0)), ("0.32rc1+cpu", (0, 32)), ("dev", ()), ("", ()), ("7", (7,))]
)
def test_release(text: str, numbers: tuple[int, ...]) -> None:
    assert interface.release(text) == numbers

"""Each public name says what it takes, what it returns, and shows it. `pytest --doctest-modules` runs the examples."""

import inspect
import re
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import jaxamp
from jaxamp import flashoptim, jmp, mpx, optim

# Constants and type aliases, which have no docstring of their own.
DATA = {f"jaxamp.{name}" for name in "COMMUNICATION Policy default_amp_policy optim.KINDS jmp.LossScale".split()}


class Public(NamedTuple):
    """A public name: what it stands for, and the class that it is in, if it is a method or a property."""

    name: str
    thing: Any
    owner: type | None

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.thing) or ""

    @property
    def is_method(self) -> bool:
        return self.owner is not None


def members(name: str, owner: type) -> Iterator[Public]:
    """Public methods and properties that a class of ours defines; fields are attributes of the class."""
    fields = getattr(owner, "_fields", ())
    for cls in owner.__mro__:
        if cls.__module__.startswith("jaxamp"):
            for key, value in vars(cls).items():
                wanted = isinstance(value, types.FunctionType | classmethod | staticmethod | property)
                if not key.startswith("_") and key not in fields and wanted:
                    thing = value if isinstance(value, property) else getattr(owner, key)
                    yield Public(f"{name}.{key}", thing, owner)


def public_names() -> Iterator[Public]:
    seen: set[int] = set()
    for module in (jaxamp, optim, flashoptim, mpx, jmp):
        for key in getattr(module, "__all__", [key for key in dir(module) if not key.startswith("_")]):
            name, thing = f"{module.__name__}.{key}", getattr(module, key)
            if name in DATA or isinstance(thing, types.ModuleType) or id(thing) in seen:
                continue
            seen.add(id(thing))
            yield Public(name, thing, None)
            if isinstance(thing, type):
                yield from members(name, thing)


NAMES = {public.name: public for public in public_names()}
each = pytest.mark.parametrize("public", NAMES.values(), ids=NAMES)


def documented(doc: str) -> list[str]:
    """The names in the section of arguments, or of attributes.

    >>> documented("Do it.\\n\\nArgs:\\n    x, y: One,\\n        or two.\\n    *rest: More.\\n\\nReturns:\\n    It.")
    ['x', 'y', 'rest']
    """
    found = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    lists = re.findall(r"^    (\S[^:\n]*):", found[1], re.MULTILINE) if found else []
    return [name.strip("*") for names in lists for name in names.split(", ")]


def parameters(public: Public) -> list[str]:
    if isinstance(public.thing, property) or (isinstance(public.thing, type) and issubclass(public.thing, Exception)):
        return []
    return [name for name in inspect.signature(public.thing).parameters if name != "self"]


def test_there_are_names():
    assert len(NAMES) > 120
    assert {"jaxamp.amp", "jaxamp.DynamicLossScaler.torch", "jaxamp.optim.Storage.codecs"} <= NAMES.keys()


@each
def test_it_says_what_it_takes(public):
    assert public.doc
    names = documented(public.doc)
    if isinstance(public.thing, type):  # the fields of a class may be more than the arguments that make one
        assert set(parameters(public)) <= set(names)
    else:
        assert names == parameters(public)


@each
def test_it_says_what_it_returns(public):
    if isinstance(public.thing, type | property):
        return
    returns_nothing = inspect.signature(public.thing).return_annotation is None
    assert returns_nothing or re.search(r"^Returns:\n    \S", public.doc, re.MULTILINE)


@each
def test_it_shows_it(public):
    examples = public.doc + (inspect.getdoc(public.owner) or "" if public.is_method else "")
    assert re.search(r"^>>> ", examples, re.MULTILINE)

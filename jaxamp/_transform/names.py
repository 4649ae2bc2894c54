"""The user's names: of a function, where it was written, and of its arguments, as `jax.jit` gives them in errors."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from jax import tree_util as jtu


def name_of(fn: Any) -> str:
    """The name of a function, or of the class of any other callable.

    >>> name_of(name_of), name_of(functools.partial(name_of)), name_of(jtu.Partial(print))
    ('name_of', 'name_of', 'print')
    """
    inner = _innermost(fn)
    return str(getattr(inner, "__name__", type(inner).__name__))


def source_of(fn: Any) -> str:
    """The name, the file and the line of a function, for errors.

    Of a callable object, those of the method that is called.
    """
    inner = _innermost(fn)
    code = getattr(inner, "__code__", None)
    if code is None:
        method = inspect.getattr_static(type(inner), "__call__", None)
        code = getattr(_innermost(getattr(method, "method", method)), "__code__", None)  # Equinox has an object there
    name = name_of(inner).replace(" ", "_")
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _innermost(fn: Any) -> Any:
    """The function that was wrapped, bound or partially applied."""
    for _ in range(100):  # a wrapper of itself would never end
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, types.MethodType):
            fn = fn.__func__
        elif callable(inner := getattr(fn, "__wrapped__", None)):
            fn = inner
        else:
            break
    return fn


def named_arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The function and its arguments, each with its name, in the order of the leaves of `(fn, args, kwargs)`."""
    yield name_of(fn), fn
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        parameters = []
    single = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    first = len(single) if parameters else 0
    for i, x in enumerate(args):
        yield (single[i] if i < len(single) else f"{rest}[{i - first}]"), x
    yield from sorted(kwargs.items())


def named_leaves(name: str, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[tuple[str, Any]]:
    """The leaves of an argument, each with its name: `params['w']`."""
    for path, leaf in jtu.tree_leaves_with_path(tree, is_leaf=is_leaf):
        yield name + jtu.keystr(path), leaf

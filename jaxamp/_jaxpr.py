"""What every reader of jaxprs needs: bind an equation, evaluate a jaxpr, remember results by identity.

Under `grad` or `vmap`, JAX applies the rules of a primitive each time that it is bound. For jitted functions it
remembers the outcome, by the types of the operands: the functions of `jnp` profit from that, and here each primitive
with its parameters is such a function. It is inlined where it is bound, so that jaxprs, source lines and scopes are
those of the bare primitive. `jit` tells apart what a trace depends on: equation contexts, meshes, JAX's configuration.
"""

import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jec
import numpy as np
from jax import lax
from jax.sharding import AxisType

from ._compat import (
    EARLY_INLINE,
    Jaxpr,
    Literal,
    Primitive,
    Stage,
    Var,
    consts_of,
    current_name_stack,
    is_transformed,
    open_jaxpr,
    user_context,
)
from ._traits import traits_of

T = TypeVar("T")

_CACHED_BINDS = 4096


# -- binding


def bind_primitive(primitive: Primitive, /, *operands: Any, **params: Any) -> Any:
    """What `primitive.bind` does, faster under a transform."""
    if traits_of(primitive).plain_params and any(map(is_transformed, operands)):
        return _jitted((primitive, tuple(params.items())))(*operands)  # JAX wants parameters that can be hashed
    return primitive.bind(*operands, **params)


@functools.lru_cache(_CACHED_BINDS)
def _jitted(*operations: tuple[Primitive, tuple[tuple[str, Any], ...]]) -> Callable[..., Any]:
    """A primitive with its parameters, and others that take its result one after the other."""

    def bound(*operands: Any) -> Any:
        for primitive, params in operations:
            out = primitive.bind(*operands, **dict(params))
            operands = (out,)
        return out

    bound.__name__ = operations[0][0].name
    return jax.jit(bound, inline=EARLY_INLINE)


def bind(eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Bind an equation's primitive to other operands and parameters."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    out = bind_primitive(eqn.primitive, *operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind_all(eqns: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Bind an equation and those that pass its result on, together."""
    if len(eqns) == 1 or not any(map(is_transformed, operands)):
        for eqn in eqns:
            operands = bind(eqn, operands)
        return list(operands)
    return [_jitted(*((eqn.primitive, tuple(eqn.params.items())) for eqn in eqns))(*operands)]


# -- evaluating


def evaluate(
    jaxpr: Jaxpr, operands: Sequence[Any], apply: Callable[[Any, list[Any]], Sequence[Any]] | None = None
) -> list[Any]:
    """Run a jaxpr: `apply(eqn, operands)` gives the results of each equation; None: they are bound as they are.

    Equations run under the user's source line, name stack and equation context. A value is dropped after its last use.
    """
    body, outer = open_jaxpr(jaxpr), current_name_stack()
    env = dict(zip((*body.constvars, *body.invars), (*consts_of(jaxpr), *operands), strict=True))
    stage = Stage.current() if apply is None else None

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqns, dead in _runs(body, together=apply is None and stage is None):
        eqn, ins = eqns[0], [read(v) for v in eqns[0].invars]
        info = eqn.source_info
        info = info.replace(name_stack=outer + info.name_stack) if outer.stack else info
        if stage is not None and traits_of(eqn.primitive).plain_params and stage.takes(eqn, ins):
            outs: Sequence[Any] = stage.write(eqn, ins, info)
        else:
            with user_context(info.traceback, name_stack=info.name_stack), eqn.ctx.manager:
                outs = _bind_all(eqns, ins) if apply is None else apply(eqn, ins)
        env.update(zip(eqns[-1].outvars, outs, strict=True))
        for var in dead:
            env.pop(var, None)
    return [read(v) for v in body.outvars]


def _runs(body: Jaxpr, together: bool) -> Iterator[tuple[list[Any], list[Var]]]:
    """The equations of an open jaxpr, each alone, and the variables that nothing reads after it.

    `together`: with the equations of the same source line that pass its result on, if nothing else reads that.
    """
    run: list[Any] = []
    dead: list[Var] = []
    for eqn, last in zip(body.eqns, _last_uses(body), strict=True):
        if run and not (together and _passes_on(eqn, run[-1], last)):
            yield run, dead
            run, dead = [], []
        run.append(eqn)
        dead += last
    if run:
        yield run, dead


def _passes_on(eqn: Any, before: Any, last: Sequence[Var]) -> bool:
    """Whether all that an equation does is to pass the result of the one before it on."""
    here, there = eqn.source_info, before.source_info
    return (
        len(eqn.invars) == len(before.outvars) == 1
        and eqn.invars[0] is before.outvars[0]
        and eqn.invars[0] in last
        and traits_of(eqn.primitive).passes_on
        and traits_of(eqn.primitive).plain_params
        and traits_of(before.primitive).plain_params
        and (eqn.ctx, here.traceback, here.name_stack) == (before.ctx, there.traceback, there.name_stack)
    )


def _last_uses(body: Jaxpr) -> list[list[Var]]:
    """For each equation of an open jaxpr, the variables that nothing reads after it."""
    seen = {v for v in body.outvars if not isinstance(v, Literal)}
    found: list[list[Var]] = []
    for eqn in reversed(body.eqns):
        mine = {v: None for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal) and v not in seen}
        seen.update(mine)
        found.append(list(mine))
    found.reverse()
    return found


_USUAL_DEPTH = 10
_FRAMES = 50  # of Python's stack, for a function inside of a function while it is planned, traced or differentiated


def make_room(jaxpr: Jaxpr) -> None:
    """Raise Python's recursion limit if functions are nested too deep for it. It stays there: threads share it."""
    depth = _depth(jaxpr, Memo())
    if depth > _USUAL_DEPTH:
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + _FRAMES * depth))


def _depth(jaxpr: Jaxpr, known: "Memo") -> int:
    inside = (body for eqn in open_jaxpr(jaxpr).eqns for body in jec.jaxprs_in_params(eqn.params))
    return known.get(jaxpr, None, lambda: 1 + max((_depth(body, known) for body in inside), default=0))


def is_on_mesh(aval: Any, *kinds: AxisType) -> bool:
    """Whether an array is on a mesh of several devices along axes of these kinds, and so may be split over them.

    The mesh is the array's own, or that of `jax.set_mesh`.
    """
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return False
    return any(kind in kinds and size > 1 for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True))


def along(fun: Callable[..., Any], operands: Sequence[Any], which: Sequence[int]) -> Callable[..., Any]:
    """`fun` as a function of some of its operands, given by their places; the others are fixed."""

    def of_some(*some: Any) -> Any:
        xs = list(operands)
        for i, x in zip(which, some, strict=True):
            xs[i] = x
        return fun(*xs)

    return of_some


# -- remembering


class Kinds:
    """Numbers for equations, equal for those that do the same with operands of the same types and the same constants.

    The memory lasts for one trace. It holds the equations, so that identities will do: JAX makes a type once for all
    equations of a kind, and a body once for all calls.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known = Memo()

    def of(self, jaxpr: Jaxpr) -> list[int]:
        """The number of each equation of a jaxpr."""
        return self._known.get(jaxpr, None, lambda: [self.number(eqn) for eqn in open_jaxpr(jaxpr).eqns])

    def number(self, eqn: Any) -> int:
        """The number of an equation."""
        return self._numbers.setdefault(_signature(eqn), len(self._numbers))


def _signature(eqn: Any) -> Hashable:
    """Equal for equations of a kind; that of an equation that may be like no other is itself."""
    traits = traits_of(eqn.primitive)
    if not (traits.plain_params or traits.plain_call):
        return id(eqn)
    ins = tuple([(id(v.aval), _bytes(v.val)) if isinstance(v, Literal) else id(v.aval) for v in eqn.invars])
    found = eqn.primitive, ins, tuple([id(v.aval) for v in eqn.outvars]), tuple(eqn.params.values())
    try:
        hash(found)
    except TypeError:
        return id(eqn)
    return found


def _bytes(number: Any) -> bytes:
    return np.asarray(number).tobytes()


# -- new equations


def in_dtype(v: Var, dtype: np.dtype) -> Var:
    """A new variable for another's values in a dtype."""
    return Var(v.aval.update(dtype=dtype, weak_type=False))


def cast_equation(like: Any, atom: Any, out: Var) -> Any:
    """An equation at the place of another that casts to the dtype of its result."""
    aval: Any = out.aval
    params = {"new_dtype": aval.dtype, "weak_type": False, "sharding": None}
    return equation_at(like, lax.convert_element_type_p, [atom], out, **params)


def equation_at(like: Any, primitive: Primitive, ins: Sequence[Any], out: Var, **params: Any) -> Any:
    """An equation at the place of another, without effects."""
    return like.replace(primitive=primitive, invars=list(ins), outvars=[out], params=params, effects=frozenset())


def inlined(jaxpr: Jaxpr, ins: Sequence[Any], outs: Sequence[Var]) -> list[Any]:
    """The equations of a jaxpr that read `ins` and make `outs`. What is made in between has variables of its own."""
    body = open_jaxpr(jaxpr)
    names: dict[Any, Any] = dict(zip((*body.invars, *body.outvars), (*ins, *outs), strict=True))
    eqns: list[Any] = []
    for eqn in body.eqns:
        names.update((v, Var(v.aval)) for v in eqn.outvars if v not in names)
        read = [v if isinstance(v, Literal) else names[v] for v in eqn.invars]
        eqns.append(eqn.replace(invars=read, outvars=[names[v] for v in eqn.outvars]))
    return eqns


class Memo:
    """A cache of results by the identity of an object and a key.

    It holds the objects, so that no other object gets the id of one that was remembered.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, Hashable], tuple[Any, Any]] = {}

    def get(self, subject: Any, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for `subject` and `key`; the first time, what `make` makes."""
        found = self._found.get((id(subject), key))
        if found is None:
            found = self._found[id(subject), key] = subject, make()
        return found[1]

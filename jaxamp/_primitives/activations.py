"""Activations whose derivatives are read off their results, which our checkpoints keep.

    relu(x)' = 1 where relu(x) > 0, else 0        tanh(x)' = (1 + tanh(x)) (1 - tanh(x))

The law: the values and derivatives, of all orders, of `jax.nn.relu` and `jnp.tanh`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive, jet_of
from .._jaxpr import bind_primitive
from .._traits import Traits, declare


def _define(name: str, fun: Callable[[Any], Any], derivative: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    own = Primitive(f"kept_{name}")

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        out = own.bind(*primals)
        return out, derivative(out, tangents[0])

    own.def_impl(functools.partial(xla.apply_primitive, own))
    own.def_abstract_eval(lambda x: x)
    mlir.register_lowering(own, mlir.lower_fun(fun, multiple_results=False))
    ad.primitive_jvps[own] = jvp
    batching.defvectorized(own)
    always = lambda *avals: True
    declare(own, Traits(nonlinear=True, derivative_of_result=True, kept=always, shown_as=name, jet=jet_of(fun)))
    return functools.partial(bind_primitive, own)


relu = _define(
    "relu", lambda x: lax.max(x, lax.full_like(x, 0)), lambda y, t: lax.select(y > 0, t, lax.full_like(t, 0))
)
tanh = _define("tanh", lax.tanh, lambda y, t: (t + t * y) * (1 - y))

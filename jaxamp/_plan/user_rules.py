"""Running a user's rule or replacement: on operands, and on their types alone to learn the dtypes of the results."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Literal
from .._formats import Formats, float_dtype, is_float
from .._policy.rules import Replacement, Rule, name_of_rule
from .sensitivity import FREE, LOW, PROTECTED, Value


def apply_rule(rule: Rule, compute_dtype: np.dtype, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Bind `eqn` with the operands and parameters that a user's rule makes of it."""
    operands = [jnp.asarray(x) if isinstance(v, Literal) else x for v, x in zip(eqn.invars, operands, strict=True)]
    params = eqn.primitive.get_bind_params(eqn.params)
    dtypes = [getattr(v.aval, "dtype", None) for v in eqn.invars]
    made = rule(compute_dtype, dtypes, *operands, **params)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise TypeError(
            f"the rule {name_of_rule(rule)!r} returned {type(made).__name__} for {eqn.primitive}; expected a pair "
            "(invars, bind_params). Write `return invars, bind_params`, or give the operation another body with "
            "jaxamp.use_replacement."
        )
    invars, params = list(made[0]), made[1]
    if len(invars) != len(operands):
        raise TypeError(
            f"the rule {name_of_rule(rule)!r} returned {len(invars)} operands for {eqn.primitive}; expected "
            f"{len(operands)}, one for each that it was given. Return the operands that it leaves alone as well."
        )
    out = eqn.primitive.bind(*invars, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def apply_replacement(
    rule: Replacement, compute_dtype: np.dtype, eqn: Any, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """The results of the body that a rule gives an operation."""
    made = rule.body(eqn.primitive, compute_dtype, *operands, **eqn.primitive.get_bind_params(params))
    outs = list(made) if eqn.primitive.multiple_results and isinstance(made, tuple | list) else [made]
    if list(map(_kind, outs)) != [_kind(v.aval) for v in eqn.outvars]:
        given, expected = (", ".join(map(_kind_text, some)) for some in (outs, [v.aval for v in eqn.outvars]))
        raise TypeError(
            f"the replacement {rule.name!r} returned {given} for {eqn.primitive}; expected {expected}, where any float "
            f"will do. Return from its body what {eqn.primitive} itself would return."
        )
    return outs


def _kind(x: Any) -> Any:
    """The shape of an array and whether it holds floats; None for anything else."""
    return (x.shape, is_float(x)) if hasattr(x, "shape") else None


def _kind_text(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "shape") else type(x).__name__


def results_of_rule(rule: Rule, formats: Formats, eqn: Any, ins: Sequence[Value]) -> tuple[Value, ...]:
    """The values that a user's rule gives an equation, from a run on abstract operands."""
    avals = [
        v.aval.update(dtype=i.dtype) if i.dtype is not None else v.aval for v, i in zip(eqn.invars, ins, strict=True)
    ]
    try:
        found = jax.make_jaxpr(lambda *xs: apply_rule(rule, formats.compute_dtype, eqn, xs))(*avals).out_avals
    except NameError:  # a collective outside of its mesh: the run casts the results to what is planned here
        found = [v.aval for v in eqn.outvars]
    return tuple(_value(formats, float_dtype(aval)) for aval in found)


def _value(formats: Formats, dtype: np.dtype | None) -> Value:
    format_ = formats.of(dtype)
    return Value(FREE if format_ is None else LOW if format_.low else PROTECTED, format_)

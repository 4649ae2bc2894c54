"""Write matmuls that contract nothing as products.

    jnp.einsum("bhl,blhp->bhlp", decay, x)

Such an outer product is element-wise work: XLA multiplies, too, but in the order of axes that a matmul gives its result,
and turns the result, in float32, before it is rounded for what reads it.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._formats import float_dtype
from .._plan.plan import Plan, Step
from .._traits.matmul_cost import is_outer_product


def multiply_outer_products(plan: Plan) -> Plan:
    """Let matmuls that contract nothing multiply element by element."""
    pairs = enumerate(zip(plan.eqns, plan.steps, strict=True)) if plan.touched else ()
    found = [i for i, (eqn, step) in pairs if is_outer_product(eqn) and _is_of_floats(eqn, step)]
    return plan.with_steps({i: plan.steps[i]._replace(operation=_multiply, touched=True) for i in found})


def _is_of_floats(eqn: Any, step: Step) -> bool:
    floats = all(float_dtype(v.aval) is not None for v in (*eqn.invars, *eqn.outvars))
    return floats and step.is_plain and eqn.params.get("out_sharding") is None


def _multiply(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The axes of a matmul's result: those of the batch, those of the left operand, those of the right one."""
    (x, y), (_, (batch_x, batch_y)) = operands, params["dimension_numbers"]
    free_x, free_y = _others(x, batch_x), _others(y, batch_y)
    dtype = params["preferred_element_type"] or jnp.result_type(x, y)
    x = lax.expand_dims(lax.transpose(x, (*batch_x, *free_x)), range(x.ndim, x.ndim + len(free_y)))
    y = lax.expand_dims(lax.transpose(y, (*batch_y, *free_y)), range(len(batch_y), len(batch_y) + len(free_x)))
    wide = jnp.promote_types(jnp.result_type(x, y), dtype)
    product = lax.mul(lax.convert_element_type(x, wide), lax.convert_element_type(y, wide))
    return [lax.convert_element_type(product, dtype)]


def _others(x: Any, axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(x.ndim) if axis not in axes]

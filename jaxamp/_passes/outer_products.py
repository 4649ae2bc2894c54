"""Write matmuls that contract nothing as products.

    jnp.einsum("bhl,blhp->bhlp", decay, x)

Such an outer product is element-wise work: XLA multiplies, too, but in the order of axes that a matmul gives its
result, and turns the result, in float32, before it is rounded for what reads it.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.sharding import AxisType

from .._formats import float_dtype
from .._jaxpr import is_on_mesh
from .._plan.plan import Plan, Step
from .._traits.matmul_cost import is_outer_product


def multiply_outer_products(plan: Plan) -> Plan:
    """Let matmuls that contract nothing multiply element by element."""
    pairs = enumerate(zip(plan.eqns, plan.steps, strict=True)) if plan.touched else ()
    found = [i for i, (eqn, step) in pairs if is_outer_product(eqn) and _is_in_one_dtype(eqn, step)]
    return plan.with_steps({i: plan.steps[i]._replace(operation=_multiply, touched=True) for i in found})


def _is_in_one_dtype(eqn: Any, step: Step) -> bool:
    """Whether it reads floats of one dtype, and gives that dtype."""
    floats = all(float_dtype(v.aval) is not None for v in (*eqn.invars, *eqn.outvars))
    is_split = any(is_on_mesh(v.aval, AxisType.Explicit) for v in eqn.invars)  # a product joins the shardings of both
    if not floats or not step.is_plain or is_split or eqn.params.get("out_sharding") is not None:
        return False
    out = (eqn.params if step.params is None else step.params)["preferred_element_type"]
    read = {None if format_ is None else format_.dtype for format_ in step.reads}
    return None not in read and len(read | ({out} if out is not None else set())) == 1


def _multiply(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The product, with the axes that a matmul gives: the batch, the rest of the left operand, that of the right."""
    (x, y), (_, (batch_x, batch_y)) = operands, params["dimension_numbers"]
    free_x, free_y = _others(x, batch_x), _others(y, batch_y)
    x = lax.expand_dims(lax.transpose(x, (*batch_x, *free_x)), range(x.ndim, x.ndim + len(free_y)))
    y = lax.expand_dims(lax.transpose(y, (*batch_y, *free_y)), range(len(batch_y), len(batch_y) + len(free_x)))
    return [lax.mul(x, y)]


def _others(x: Any, axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(x.ndim) if axis not in axes]

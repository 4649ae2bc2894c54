"""Round the cotangent of an exponent once, where several sums or a cumulative sum read it.

    jnp.exp(a[:, None] - a[None, :] + b[None, :]) * (q @ k.T) @ v        jnp.exp(jnp.cumsum(a)) * q

The derivative of what the exponent is made of is a sum along each axis along which a part of it was repeated, and of a
cumulative sum it is one in the other direction. XLA writes the cotangent to memory for all of these, in float32,
although what it is made of has been rounded: the exponentials multiply what a matmul reads. So it is written once,
rounded. Where only one or two sums read the cotangent, it is made in their kernels and never written. Float16 is left
alone: products of what is rounded may be beyond its range.

That is how decays reach the scores in linear attention, an mLSTM, or a state space that is computed by chunks.
"""

from typing import NamedTuple

from jax import lax

from .._compat import Literal, Var
from .._plan.classify import Mode
from .._plan.plan import Plan, Readers, map_steps
from .._traits import traits_of
from .._traits.matmul_cost import is_outer_product, size_of
from .norms import RoundedCotangent, has, is_elementwise

_SEVERAL = 3  # sums. For two, XLA makes the cotangent twice and does not write it.


def round_exponent_cotangents(plan: Plan) -> Plan:
    """Let the cotangents of exponents be low, where low operations read the exponentials, and sums the cotangents."""
    if not plan.touched or plan.setting.keep == "all" or plan.setting.formats.is_narrow:
        return plan
    powers = [i for i in plan.parts if isinstance(i, int) and _is_exponential(plan, i)]
    if not powers:
        return plan
    readers, made = plan.readers(), {v: i for i, eqn in enumerate(plan.eqns) for v in eqn.outvars}
    ends = (_end_of_exponent(plan, plan.eqns[i].invars[0], made) for i in powers)
    alone = {i for i in plan.parts if isinstance(i, int)}
    found = {i for i in ends if i in alone and _may_round(plan, i) and _is_read_low(plan, i, readers)}
    if not found:
        return plan
    return plan._replace(parts=map_steps(plan.parts, lambda i: RoundedCotangent((i,), i) if i in found else i))


def _is_exponential(plan: Plan, i: int) -> bool:
    """Whether it is one of more than a number, in float32, and nobody asks for that."""
    eqn = plan.eqns[i]
    is_one = eqn.primitive in (lax.exp_p, lax.exp2_p) and not isinstance(eqn.invars[0], Literal)
    return is_one and size_of(eqn.invars[0].aval) > 1 and _may_round(plan, i)


def _may_round(plan: Plan, i: int) -> bool:
    """Whether it has one result, in float32, and nobody asks for that."""
    eqn, step = plan.eqns[i], plan.steps[i]
    is_free = len(eqn.outvars) == 1 and step.mode is not Mode.RULE and not step.is_pinned
    return is_free and not step.outs[0].is_low and plan.setting.formats.may_lower(eqn.outvars[0])


class _Parts(NamedTuple):
    """What an exponent is made of."""

    repeated: int  # parts that are repeated
    accumulated: int | None  # the step that is a cumulative sum, if there is one


def _end_of_exponent(plan: Plan, exponent: Var, made: dict[Var, int]) -> int | None:
    """The step whose result has the cotangent that sums or a cumulative sum read; None if these are few.

    The last one of an exponent, or a cumulative sum, of which several exponentials may be made.
    """
    found = _parts(plan, exponent, made)
    if found.accumulated is not None:
        return found.accumulated
    return made[exponent] if found.repeated >= _SEVERAL else None


def _parts(plan: Plan, exponent: Var, made: dict[Var, int]) -> _Parts:
    repeated, accumulated, waiting, seen = 0, None, [exponent], {exponent}
    while waiting:
        var = waiting.pop()
        if var not in made:
            continue
        eqn, size = plan.eqns[made[var]], size_of(var.aval)
        if has(eqn, lambda inner: inner.primitive is lax.cumsum_p):
            accumulated = made[var]
        elif is_elementwise(eqn):
            for v in eqn.invars:
                if isinstance(v, Literal) or v in seen or not plan.setting.formats.may_lower(v):
                    continue
                seen.add(v)
                is_whole = size_of(v.aval) == size
                repeated += not is_whole
                waiting += [v] if is_whole else []
    return _Parts(repeated, accumulated)


def _is_read_low(plan: Plan, i: int, readers: Readers) -> bool:
    """Whether all that has the size of a result is read low in the end, after element-wise work.

    Sums, maxima and some of the entries may be read by others: they are subtracted, or divided by.
    """
    waiting, seen, is_low = [plan.eqns[i].outvars[0]], set[int](), False
    size = size_of(waiting[0].aval)
    while waiting:
        for reader in readers.get(waiting.pop(), []):
            if reader.format is not None and reader.format.low:
                is_low = True
            elif reader.place == len(plan.eqns):
                return False
            elif reader.place not in seen:
                seen.add(reader.place)
                eqn, step = plan.eqns[reader.place], plan.steps[reader.place]
                traits, is_whole = traits_of(eqn.primitive), all(size_of(v.aval) == size for v in eqn.outvars)
                may_follow = (
                    is_elementwise(eqn) or is_outer_product(eqn) if is_whole else traits.reduces or traits.rearranges
                )
                if not may_follow or step.mode is Mode.RULE or step.is_pinned:
                    return False
                waiting += eqn.outvars if is_whole else []
    return is_low

"""Hold values low that are read low and in float32, where that adds little error.

The sum of a skip connection is read by a convolution, low, and by the next sum, in float32. It would be written in both
dtypes, and kept for the backward pass in float32. If all that is added in it comes from low matmuls, it has the error
of a rounding already, and one more rounding costs little. A sum with something exact is not touched, nor is what an
exponential or another function has made. An embedding is exact too, but the layers that are added to it are of its size
or larger: so that sum is held low, if a result of a matmul is added to it as it is.

A sum that the next one adds to is written to memory once, rounded. XLA drops a rounding where all readers widen the
result again, and would write it in float32 for them, and once more for the matmuls. (A sum that only a norm reads is
computed again where that is cheaper.)

An activation that is summed over pixels and scaled by what comes of that, in a squeeze and excitation, is also written
once, rounded: XLA computes no exponential twice, so it would write it in float32 for both readers.

The sum of two matmuls, `x @ w + h @ u`, is held low as well, where nothing else reads them: of both results, the
backward pass would read only the sum. So is one of scores by content and by position, which are shifted or looked up
first, and one of results that are scaled by few numbers, as in a state space that is computed by chunks. A Fourier
transform of rounded values is a matmul in this sense: it is linear, so that its result has their error, although it is
computed in float32.

A maximum over windows is in memory, too. Where several operations read it, as the norms of a DenseNet do, it is held
low. An average is not: local variances are differences of averages.

A recurrence in parallel, `associative_scan` over pairs of a decay and a value, is many such sums: each is read by two
later levels, in float32. The values are rounded, and the decays are not: errors in these multiply along the sequence.
`recurrences.py` makes one operation of all of them.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jec
import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr
from .._formats import Format, float_dtype, is_complex, is_integer
from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Reader, Readers, Runner, Step, map_steps
from .._plan.residuals import is_expensive
from .._primitives.barriers import materialize, materialize_cotangent
from .._primitives.pool import POOLS
from .._traits import traits_of
from .._traits.matmul_cost import is_outer_product, size_of


def hold_streams_low(plan: Plan) -> Plan:
    """Let results that are read in both dtypes, and sums that several operations read, be held low."""
    if not plan.touched:
        return plan
    wide = [i for i in plan.parts if isinstance(i, int) and _is_wide(plan, i)]
    readers = plan.readers() if wide else {}
    known = _known(plan) if wide else _Known.nothing()
    of_matmuls = _sums_of_matmuls(plan, wide, readers, known.transformed)
    asked = lambda i, is_so: is_so(plan, i, readers.get(plan.eqns[i].outvars[0], []))
    pooled = {i for i in wide if _is_pooled(plan, i, readers)}
    mixed = [i for i in wide if i in of_matmuls or i in pooled or asked(i, _is_read_in_both)]
    if not mixed:
        return plan
    magnified = _magnified(plan)
    wide_for_all = {i for i in mixed if i in of_matmuls or asked(i, _is_wide_for_all)} - pooled
    steps = Memo()  # equations of a kind share a step
    changed = {
        i: steps.get(plan.steps[i], None, functools.partial(_held_low, plan.steps[i], plan.setting.formats.low))
        for i in mixed
        if plan.eqns[i].outvars[0] in known.rounded
        and plan.eqns[i].outvars[0] not in magnified
        and (i not in wide_for_all or _all_known(plan.eqns[i], known))
    }
    written = {
        i for i in changed if i in wide_for_all | pooled or plan.eqns[i].primitive in POOLS or asked(i, _goes_on)
    }
    plan = plan.with_steps(changed)
    made = {v: i for i, eqn in enumerate(plan.eqns) for v in eqn.outvars} if written & of_matmuls else {}
    turned = {i for i in written & of_matmuls if _adds_turned(plan, i, made)}
    regions = {i: Written((i,), i, i not in pooled, i in turned) for i in written}
    return plan._replace(parts=map_steps(plan.parts, lambda i: regions.get(i, i)))


class Written(NamedTuple):
    """An operation whose result is written to memory once, rounded, and perhaps its cotangent, too."""

    parts: tuple[Part, ...]
    last: int
    cotangent: bool
    row_major: bool  # whether it is laid out in the order of its axes

    def with_parts(self, parts: tuple[Part, ...]) -> "Written":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        runner.run_parts(plan, self.parts, env)
        ((var, value),) = plan.values_of(self.last)
        low = plan.setting.formats.compute_dtype
        with runner.at(plan, self.last):
            x = materialize(env.read(var), low, self.row_major)
            env.write(var, materialize_cotangent(x, low, row_major=self.row_major) if self.cotangent else x, value)


def _is_read_in_both(plan: Plan, i: int, readers: list[Reader]) -> bool:
    """Whether something reads the result of a step low, or might, and nothing asks for float32."""
    return _may_round(plan, readers) and (_is_read_low(readers) or _is_shared_sum(plan, i, readers))


def _held_low(step: Step, low: Format) -> Step:
    return step._replace(outs=(step.outs[0]._replace(format=low),), touched=True)


def _is_wide(plan: Plan, i: int) -> bool:
    """Whether a step has one result, which may be held low and is not."""
    eqn, step = plan.eqns[i], plan.steps[i]
    if len(eqn.outvars) != 1 or step.mode in (Mode.RULE, Mode.CONSTANT) or step.is_pinned:
        return False
    return (
        step.outs[0].format is not None and not step.outs[0].is_low and plan.setting.formats.may_lower(eqn.outvars[0])
    )


def _may_round(plan: Plan, readers: list[Reader]) -> bool:
    """Whether no reader asks for float32: neither the user, who gets it as a result or has pinned an operation."""
    last = len(plan.eqns)
    return all(r.place < last and (not plan.steps[r.place].is_pinned or _is_low(r)) for r in readers)


def _is_low(reader: Reader) -> bool:
    return reader.format is not None and reader.format.low


def _is_read_low(readers: list[Reader]) -> bool:
    return any(map(_is_low, readers)) and not all(map(_is_low, readers))


def _is_shared_sum(plan: Plan, i: int, readers: list[Reader]) -> bool:
    """Whether it is a sum of low values that is wide for the sake of several readers. Few sums are beyond bfloat16.

    Or a maximum or a minimum over windows, which is in memory, too. An average is more exact than what it is made of,
    and may be subtracted from that.
    """
    several = len({reader.place for reader in readers}) > 1
    is_one = _adds_several(plan.eqns[i]) or plan.eqns[i].primitive in POOLS
    return several and is_one and not plan.setting.formats.is_narrow


def _is_pooled(plan: Plan, i: int, readers: Readers) -> bool:
    """Whether it is an activation that is summed, and otherwise read low, or multiplied by something and then read low.

    XLA computes none twice. Not where rows are summed, as by a LayerNorm: that is one kernel, with all that reads them.
    And not where the mean is subtracted, or anything else may cancel: rounding it would be one error more.
    """
    (out, *_), own = plan.eqns[i].outvars, readers.get(plan.eqns[i].outvars[0], [])
    others = [r for r in own if r.place == len(plan.eqns) or not _sums_pixels(plan.eqns[r.place], out)]
    if not others or len(others) == len(own) or plan.setting.formats.is_narrow or not _may_round(plan, own):
        return False
    return all(_is_low(r) or _is_scaled_low(plan, r, readers) for r in others) and _is_costly(plan, i, out)


def _sums_pixels(eqn: Any, operand: Any) -> bool:
    return traits_of(eqn.primitive).reduces and [*eqn.params["axes"]] != [operand.aval.ndim - 1]


def _is_scaled_low(plan: Plan, reader: Reader, readers: Readers) -> bool:
    """Whether it multiplies by something, and only low operations read the product."""
    if reader.place == len(plan.eqns) or not traits_of(plan.eqns[reader.place].primitive).product:
        return False
    after = readers.get(plan.eqns[reader.place].outvars[0], [])
    return bool(after) and all(map(_is_low, after))


def _is_costly(plan: Plan, i: int, out: Var) -> bool:
    """Whether a step, or element-wise work just before it, has a function such as an exponential."""
    read = {out}
    for eqn in reversed(plan.eqns[max(0, i + 1 - _NEAR) : i + 1]):
        if read.isdisjoint(eqn.outvars):
            continue
        if is_expensive(eqn):
            return True
        traits = traits_of(eqn.primitive)
        if traits.elementwise or traits.plain_call or traits.own_jvp:
            read.update(v for v in eqn.invars if _is_large(v, out))
    return False


def _goes_on(plan: Plan, i: int, readers: list[Reader]) -> bool:
    """Whether it is a sum that is added to again."""
    return _adds_several(plan.eqns[i]) and any(_adds_several(plan.eqns[r.place]) for r in readers)


def _adds_several(eqn: Any) -> bool:
    """Whether it is a sum of two arrays of its size."""
    return traits_of(eqn.primitive).sum and all(_is_large(v, eqn.outvars[0]) for v in eqn.invars)


def _sums_of_matmuls(plan: Plan, wide: Sequence[int], readers: Readers, transformed: Collection[Var]) -> set[int]:
    """Sums of two low matmuls or more, and of biases, that are read in float32. Nothing else reads what they add.

    Each may be scaled by few numbers, and other low values may be added that are. A Fourier transform of rounded values
    counts as a matmul.
    """
    sums = [i for i in wide if traits_of(plan.eqns[i].primitive).sum and not plan.setting.formats.is_narrow]
    if not sums or plan.setting.keep == "all":
        return set()
    made: dict[Var, int] = {}  # by which operation
    matmuls: list[int | None] = []  # how many each operation adds, itself counted; None if it adds something else
    low = {v for v, value in zip(open_jaxpr(plan.jaxpr).invars, plan.ins, strict=True) if value.is_low}
    for i, (eqn, step) in enumerate(zip(plan.eqns, plan.steps, strict=True)):
        made.update(dict.fromkeys(eqn.outvars, i))
        low.update(v for v, value in plan.values_of(i) if value.is_low)
        traits, found = traits_of(eqn.primitive), None
        adds = traits.sum or traits.keeps_all_entries or traits.passes_on
        if traits.matmul and not is_outer_product(eqn):
            found = 1 if step.outs[0].is_low else None
        elif not adds and any(v in transformed for v in eqn.outvars):
            found = 1
        elif _is_linear(eqn, step) and not step.is_pinned and step.mode is not Mode.RULE:
            scales = _scales(eqn)
            large = [v for v in eqn.invars if (_is_large if adds or scales else _is_most)(v, eqn.outvars[0])]
            counts = [matmuls[made[v]] if v in made and len(readers[v]) == 1 else None for v in large]
            if scales and counts == [None] and large[0] in low:
                counts = [0]  # no matmul, and read as it is held
            known = [count for count in counts if count is not None]
            found = sum(known) if known and len(known) == len(counts) else None
        matmuls.append(found)
    several = {i for i in sums if (matmuls[i] or 0) > 1 and _may_round(plan, readers.get(plan.eqns[i].outvars[0], []))}
    inside = {made[v] for i in several for v in plan.eqns[i].invars if not isinstance(v, Literal) and v in made}
    return several - inside


def _is_linear(eqn: Any, step: Step) -> bool:
    """Whether an operation adds arrays, moves their entries, or scales them by few numbers."""
    traits = traits_of(eqn.primitive)
    adds = traits.sum or traits.keeps_all_entries or traits.passes_on
    return bool(eqn.outvars) and (adds or _scales(eqn) or _moves(eqn, step))


def _scales(eqn: Any) -> bool:
    """Whether it multiplies one array by few numbers, which are repeated, or divides it by them."""
    large = [_is_large(v, eqn.outvars[0]) for v in eqn.invars]
    is_product = traits_of(eqn.primitive).product or is_outer_product(eqn)
    return is_product and sum(large) == 1 and (large[0] or eqn.primitive is not lax.div_p)


def _adds_turned(plan: Plan, i: int, made: dict[Var, int]) -> bool:
    """Whether results of matmuls that a sum adds are transposed. Those of convolutions have layouts of their own."""
    waiting, seen, turned = [i], {i}, False
    while waiting:
        j = waiting.pop()
        eqn, is_outer = plan.eqns[j], is_outer_product(plan.eqns[j])
        if traits_of(eqn.primitive).convolves:
            return False
        turned = turned or is_outer or eqn.primitive is lax.transpose_p
        if is_outer or (_is_linear(eqn, plan.steps[j]) and not traits_of(eqn.primitive).matmul):
            before = {made[v] for v in eqn.invars if _is_large(v, eqn.outvars[0]) and v in made}
            waiting += before - seen
            seen |= before
    return turned


def _moves(eqn: Any, step: Step) -> bool:
    """Whether the result holds entries of an operand, or it calls a function of which that is true, as `jnp.pad`."""
    traits = traits_of(eqn.primitive)
    if traits.plain_call and len(step.bodies) == 1:
        inside = zip(open_jaxpr(step.bodies[0].jaxpr).eqns, step.bodies[0].steps, strict=True)
        return all(_moves(inner, own) for inner, own in inside)
    return traits.moves or traits.passes_on or not any(_is_number(v.aval) for v in (*eqn.invars, *eqn.outvars))


def _is_most(atom: Any, out: Var) -> bool:
    """Whether an operand is no smaller than half of what is made of it, as if it is padded."""
    return not isinstance(atom, Literal) and _is_number(atom.aval) and 2 * size_of(atom.aval) >= size_of(out.aval) > 1


_NEAR = 16  # equations: a gelu has eight
_LEAST = 0.5  # a factor that leaves a product about as large as it was


def _is_wide_for_all(plan: Plan, i: int, readers: list[Reader]) -> bool:
    """Whether a sum and all that reads it are float32 for their own sake, as where each step of a recurrence decays."""
    return plan.steps[i].mode is Mode.AS_WRITTEN and not any(map(_is_low, readers))


def _is_large(atom: Any, out: Var) -> bool:
    return not isinstance(atom, Literal) and size_of(atom.aval) == size_of(out.aval) > 1


# -- what has the error of a rounding


class _Known(NamedTuple):
    """What is known of the variables of a body."""

    rounded: set[Var]  # their error is that of a low value of their size, or more
    products: set[Var]  # rounded: results of low matmuls, perhaps moved, with a bias or a dropout
    looked_up: set[Var]  # rows of a table, and what element-wise operations make of them
    transformed: set[Var]  # rounded: results of Fourier transforms, perhaps moved or scaled
    zeros: set[Var]  # arrays of zeros

    @classmethod
    def nothing(cls) -> "_Known":
        return cls(*(set[Var]() for _ in cls._fields))

    def of(self, outside: Sequence[Any], inside: Sequence[Var]) -> "_Known":
        """The same of the operands of a body inside."""
        pairs = [(v, atom) for v, atom in zip(inside, outside, strict=True) if not isinstance(atom, Literal)]
        found = _Known(*({v for v, atom in pairs if atom in known} for known in self))
        found.zeros.update(v for v, atom in zip(inside, outside, strict=True) if _is_zero(atom))
        return found


def _known(plan: Plan, given: _Known | None = None) -> _Known:
    """What is known of the variables of a plan, if that of its operands is given.

    Rounded ones are made of results of low matmuls by sums, by choices, as by a relu or a pooling, and by products with
    anything: a silu or a gelu of a rounded `x` is `x` times something. Not by an exponential, or as a divisor: the
    result may be far more exact than what was read. In float16, products of two large arrays are often out of range.
    """
    known = _Known.nothing() if given is None else given
    rounded, products, looked_up, transformed, zeros = known
    rounded.update(v for v, value in zip(open_jaxpr(plan.jaxpr).invars, plan.ins, strict=True) if value.is_low)
    repeated: set[Var] = set()  # few numbers, repeated: biases, statistics, constants
    masks: set[Var] = set()  # of these, zeros and ones
    for eqn, step in zip(plan.eqns, plan.steps, strict=True):
        traits = traits_of(eqn.primitive)
        numbers = [v for v in eqn.invars if _is_number(v.aval)]
        own = [v for v in numbers if any(_is_large(v, out) for out in eqn.outvars) and v not in repeated]
        inside = _inside(eqn, step, known)
        is_low_matmul = traits.matmul and (step.mode is Mode.LOW or any(value.is_low for value in step.outs))
        in_range = len(own) < 2 or not plan.setting.formats.is_narrow
        if is_low_matmul or any(value.is_low for value in step.outs) or (in_range and _is_product_of(eqn, rounded)):
            rounded.update(eqn.outvars)
        elif not own and traits.elementwise:
            repeated.update(eqn.outvars)
        elif (
            _is_moved(eqn, rounded, zeros)
            or _is_as_exact(eqn, inside, own, rounded)
            or _is_in_stream(eqn, own, known)
            or _is_transformed(eqn, inside, own, known)
        ):
            rounded.update(eqn.outvars)
        if eqn.primitive is lax.convert_element_type_p and eqn.invars[0].aval.dtype == bool:
            masks.update(eqn.outvars)
            repeated.update(eqn.outvars)
        if eqn.primitive in _REPEATS and _is_zero(eqn.invars[0], zeros):
            zeros.update(eqn.outvars)
        if _is_transformed(eqn, inside, own, known):
            transformed.update(eqn.outvars)
        if is_low_matmul or _is_as_large(eqn, inside, own, products, masks):
            products.update(eqn.outvars)
        if eqn.primitive is lax.gather_p or _is_looked_up(eqn, inside, own, looked_up):
            looked_up.update(eqn.outvars)
    return known


def _inside(eqn: Any, step: Step, known: _Known) -> list[bool] | None:
    """Of each set, whether all results of a function are in it; None if the equation does not call one."""
    traits, body = traits_of(eqn.primitive), step.bodies[0] if len(step.bodies) == 1 else None
    if step.mode is not Mode.ENTER or body is None or not (traits.plain_call or traits.own_jvp):
        return None
    own = open_jaxpr(body.jaxpr)
    found = _known(body, known.of(eqn.invars, own.invars))
    return [all(not isinstance(v, Literal) and v in some for v in own.outvars) for some in found]


def _is_in_stream(eqn: Any, own: Sequence[Any], known: _Known) -> bool:
    """Whether it adds what a matmul gives to an embedding."""
    is_known = all(v in known.rounded or v in known.looked_up for v in own)
    return traits_of(eqn.primitive).sum and is_known and any(v in known.products for v in own)


def _is_as_large(
    eqn: Any, inside: list[bool] | None, own: Sequence[Any], products: Collection[Var], masks: Collection[Var]
) -> bool:
    """Whether the result of an operation is of the size of the products that it reads."""
    if inside is not None:
        return inside[1]
    traits = traits_of(eqn.primitive)
    plain = traits.sum or traits.moves or traits.passes_on or traits.sums_devices or traits.keeps_all_entries
    if traits.product:  # of a dropout
        factors = [abs(v.val) for v in eqn.invars if isinstance(v, Literal) and np.ndim(v.val) == 0]
        is_masked = any(v in masks for v in eqn.invars if not isinstance(v, Literal))
        plain = is_masked or any(_LEAST <= factor <= 1 / _LEAST for factor in factors)
    return plain and bool(own) and all(v in products for v in own)


def _is_looked_up(eqn: Any, inside: list[bool] | None, own: Sequence[Any], looked_up: Collection[Var]) -> bool:
    if inside is not None:
        return inside[2]
    if eqn.primitive in _TRANSFORMS:
        return not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in looked_up
    return traits_of(eqn.primitive).elementwise and bool(own) and all(v in looked_up for v in own)


_REPEATS = lax.broadcast_in_dim_p, lax.convert_element_type_p
_TRANSFORMS = lax.fft_p, lax.real_p, lax.imag_p


def _is_transformed(eqn: Any, inside: list[bool] | None, own: Sequence[Any], known: _Known) -> bool:
    """Whether it is a Fourier transform of rounded values, or one that was moved or scaled."""
    if inside is not None:
        return inside[3]
    if eqn.primitive in _TRANSFORMS:
        return not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in known.rounded
    scaled = traits_of(eqn.primitive).product and bool(own) and all(v in known.transformed for v in own)
    return scaled or _is_moved(eqn, known.transformed, known.zeros)


def _is_product_of(eqn: Any, variables: Collection[Var]) -> bool:
    """Whether it is one of these variables times, or divided by, something; an outer product counts."""
    traits = traits_of(eqn.primitive)
    if not (traits.product or is_outer_product(eqn) or (traits.matmul and is_complex(eqn.outvars[0].aval))):
        return False
    factors = eqn.invars[:1] if eqn.primitive is lax.div_p else eqn.invars
    return any(not isinstance(v, Literal) and v in variables for v in factors)


def _is_moved(eqn: Any, variables: Collection[Var], zeros: Collection[Var]) -> bool:
    """Whether its result holds entries of these variables, perhaps zeros, and no others."""
    numbers = [v for v in eqn.invars if _is_number(v.aval) and not isinstance(v, Literal)]
    numbers = [v for v in numbers if not _is_empty(v) and v not in zeros]
    return traits_of(eqn.primitive).moves and bool(numbers) and all(v in variables for v in numbers)


def _all_known(eqn: Any, known: _Known) -> bool:
    """Whether all large operands are rounded or looked up: none is made of constants, such as a mask to be added."""
    return all(v in known.rounded or v in known.looked_up for v in eqn.invars if _is_large(v, eqn.outvars[0]))


def _is_number(aval: Any) -> bool:
    return float_dtype(aval) is not None or is_complex(aval)


def _is_zero(atom: Any, zeros: Collection[Var] = ()) -> bool:
    if not isinstance(atom, Literal):
        return atom in zeros
    return (_is_number(atom.aval) or is_integer(atom.aval)) and np.ndim(atom.val) == 0 and bool(atom.val == 0)


def _is_empty(v: Var) -> bool:
    return any(isinstance(size, int) and size == 0 for size in getattr(v.aval, "shape", ()))


def _is_as_exact(eqn: Any, inside: list[bool] | None, own: Sequence[Any], rounded: Collection[Var]) -> bool:
    """Whether the result of an operation is about as exact as rounded ones of its large operands, next to its size."""
    if inside is not None:
        return inside[0]
    traits, rounded_own = traits_of(eqn.primitive), [v for v in own if v in rounded]
    if not rounded_own or traits.product:
        return False
    plain = (traits.elementwise and not traits.nonlinear) or traits.compares or traits.keeps_all_entries
    return plain and len(rounded_own) == len(own)


def _magnified(plan: Plan) -> Collection[Var]:
    """What a decomposition or a solve reads, through anything that is not a matmul."""
    body, known = open_jaxpr(plan.jaxpr), Memo()
    results = zip(body.outvars, plan.magnified, strict=True) if plan.magnified else ()
    found = {v for v, is_magnified in results if is_magnified and not isinstance(v, Literal)}
    for eqn in reversed(body.eqns):
        passes_on = not traits_of(eqn.primitive).matrix_unit and any(v in found for v in eqn.outvars)
        if passes_on or _decomposes(eqn, known):
            found.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _decomposes(eqn: Any, known: Memo) -> bool:
    def decomposes(body: Jaxpr) -> bool:
        return known.get(body, None, lambda: any(_decomposes(inner, known) for inner in open_jaxpr(body).eqns))

    return traits_of(eqn.primitive).magnifies or any(map(decomposes, jec.jaxprs_in_params(eqn.params)))

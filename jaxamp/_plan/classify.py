"""The judge: the standing of each value of a jaxpr, and from it a verdict on each equation.

A table per primitive can't say both "an add between two matmuls is low" and "an add after exp is float32". So the
jaxpr is read forwards, and each equation is judged by its rule in the policy and by the standings of its operands
(`_standing`). A nested jaxpr is judged with the standings of its operands; a loop's carry enters its body as exact.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Primitive, Var, consts_of, open_jaxpr, scopes
from .._policy.rules import (
    Rule,
    use_compute_precision,
    use_inferred_precision,
    use_original_precision,
    use_widest_precision,
)
from .._policy.toml import Found, Lookup, load_policy
from .._primitives.attention import ATTENTION, takes_part
from .._primitives.matmul import is_mixed
from .._traits.table import FIXED, INTO_BUFFER, MOVES, ONE_TO_ONE, PLACES, POSITIONS, PRESERVES
from .higher_order import Entry, describe
from .sensitivity import (
    EXACT,
    FREE,
    LOW,
    POSITION,
    WIDE,
    Standing,
    Value,
    combine,
    constant_standing,
    float_dtype,
    is_wide_integer,
    may_lower,
    standing_of_argument,
)

Path = tuple[str, ...]  # named scopes, outermost first


class How(enum.Enum):
    """How an equation gets its dtypes."""

    ORIGINAL = "as written"
    LOW = "in the compute dtype"
    FOLLOW = "in the compute dtype, unless its result is only wanted wide"
    WIDEST = "in the widest dtype of its operands"
    EACH = "each operand in the dtype it is held in"
    BUFFER = "in the dtype of its first operand"
    ALIAS = "a cast that has nothing to do"
    FOLDED = "a transpose that the matmul before it has made"
    CONSTANT = "a literal, spread in the dtype that its reader wants"
    RULE = "as a user's rule says"
    ENTER = "its inside is planned"


class Verdict(NamedTuple):
    how: How
    reason: str
    outs: tuple[Standing, ...]
    found: Found
    entry: Entry | None = None
    bodies: tuple[tuple[Standing, ...], ...] = ()  # the standings that each body of `entry` is entered with


class Judge:
    """What verdicts depend on besides the jaxpr, with a memory that lasts for one trace."""

    def __init__(self, lookup: Lookup, compute_dtype: np.dtype):
        self.lookup = lookup
        self.compute_dtype = compute_dtype
        self._judged: dict[Any, Any] = {}
        self._constants: dict[int, tuple[Any, Standing]] = {}

    # -- values

    def may_lower(self, atom: Any) -> bool:
        return may_lower(float_dtype(atom.aval), self.compute_dtype)

    def value(self, standing: Standing, aval: Any) -> Value:
        """A value of this standing, in the dtype that goes with it."""
        dtype = float_dtype(aval)
        if dtype is not None and standing is LOW and may_lower(dtype, self.compute_dtype):
            dtype = self.compute_dtype
        return Value(standing, dtype)

    def standing_of_constant(self, const: Any) -> Standing:
        """What can be looked at while tracing is; large arrays, and those of outer traces, stand as arguments do."""
        aval = jax.typeof(const)
        if not (float_dtype(aval) is not None or is_wide_integer(aval)):
            return FREE
        if isinstance(const, jax.Array) and not _is_small_and_here(const):
            return standing_of_argument(aval)
        if id(const) not in self._constants:
            self._constants[id(const)] = (const, constant_standing(const, self.compute_dtype))
        return self._constants[id(const)][1]

    def of_constants(self, jaxpr: Jaxpr) -> dict[Var, Standing]:
        pairs = zip(open_jaxpr(jaxpr).constvars, consts_of(jaxpr), strict=True)
        return {var: self.standing_of_constant(const) for var, const in pairs}

    # -- verdicts

    def read(self, jaxpr: Jaxpr, ins: tuple[Standing, ...], path: Path) -> tuple[list[Verdict], tuple[Standing, ...]]:
        """A verdict for each equation, and the standings of the results, for operands of standings `ins`."""
        key = (id(jaxpr), ins, path)
        if key not in self._judged:
            self._judged[key] = (jaxpr, self._read(jaxpr, ins, path))  # the jaxpr, so that its id stays taken
        return self._judged[key][1]

    def _read(self, jaxpr: Jaxpr, ins: tuple[Standing, ...], path: Path) -> tuple[list[Verdict], tuple[Standing, ...]]:
        env: dict[Var, Standing] = self.of_constants(jaxpr)
        env.update(zip(open_jaxpr(jaxpr).invars, ins, strict=True))

        def read(atom: Any) -> Standing:
            return self.standing_of_constant(atom.val) if isinstance(atom, Literal) else env[atom]

        verdicts = []
        for eqn in open_jaxpr(jaxpr).eqns:
            verdict = self._verdict(eqn, [read(v) for v in eqn.invars], path + scopes(eqn.source_info.name_stack))
            env.update(zip(eqn.outvars, verdict.outs, strict=True))
            verdicts.append(verdict)
        return verdicts, tuple(read(v) for v in open_jaxpr(jaxpr).outvars)

    def _verdict(self, eqn: Any, ins: list[Standing], path: Path) -> Verdict:
        found = self.lookup(path, eqn.primitive)
        entry = describe(eqn)
        if entry is not None and not _keeps_out(found):
            return self._enter(eqn, entry, ins, path, found)
        how, reason, standing = self._decide(eqn, ins, found)
        if how is How.EACH:
            return Verdict(how, reason, tuple(ins), found)
        floats = [standing] * len(eqn.outvars)
        if how is How.RULE:
            values = [self.value(s, v.aval) for s, v in zip(ins, eqn.invars, strict=True)]
            floats = [value.standing for value in self.outs_of_rule(eqn, values, found.rule)]
        if how is How.LOW and eqn.primitive in ATTENTION:
            floats = [LOW if part else EXACT for part in takes_part(eqn.primitive, eqn.params)[1]]
        integers = _standing_of_integers(eqn, ins)
        outs = tuple(
            s if float_dtype(v.aval) is not None else integers if is_wide_integer(v.aval) else FREE
            for s, v in zip(floats, eqn.outvars, strict=True)
        )
        return Verdict(how, reason, outs, found)

    def _decide(self, eqn: Any, ins: list[Standing], found: Found) -> tuple[How, str, Standing]:
        """How a plain equation runs, why, and the standing of its float results."""
        name = eqn.primitive.name
        floats = [
            standing
            for standing, atom in zip(ins, eqn.invars, strict=True)
            if float_dtype(atom.aval) is not None and not _takes_any_dtype(atom, standing)
        ]
        together = combine(floats)
        if name not in PRESERVES and together > EXACT:
            together = EXACT
        kept = together if together > EXACT else EXACT
        if is_mixed(eqn.primitive):
            return How.ORIGINAL, "low already, by an amp inside", LOW
        if found.rule not in _KNOWN:
            return How.RULE, _source(found), kept
        if eqn.primitive is lax.convert_element_type_p:
            return self._decide_cast(eqn, ins[0])
        if name in POSITIONS:
            return How.ORIGINAL, "made from positions", POSITION
        reads_floats = any(map(self.may_lower, eqn.invars))
        if found.rule is use_original_precision:
            unknown = found.key is None and name not in FIXED and reads_floats
            return How.ORIGINAL, f"not entered: {name}" if unknown else _source(found), kept
        if eqn.primitive in ATTENTION:
            return self._decide_attention(eqn, ins, found)
        if name in FIXED and not _rounds_nothing(eqn):
            return How.ORIGINAL, f"{name} has a fixed dtype", kept
        if not _is_by_primitive(found) and eqn.primitive not in load_policy("default"):
            return How.ORIGINAL, f"not entered: {name}" if reads_floats else _source(found), kept
        if name in MOVES and together is FREE and all(isinstance(v, Literal) for v in eqn.invars):
            return How.CONSTANT, "a constant", FREE
        mine = [self.may_lower(v) for v in eqn.invars if float_dtype(v.aval) is not None]
        if not any(mine):
            widens = any(self.may_lower(v) for v in eqn.outvars)  # asked for by `preferred_element_type`
            return How.ORIGINAL, "nothing to lower", kept if floats and widens else together
        if found.rule is use_compute_precision:
            refusal = self._refuses(eqn, eqn.invars, ins)
            if refusal is None:
                return How.LOW, _source(found), LOW
            if refusal != _OUTER:
                return How.ORIGINAL, refusal, kept
        if not all(mine) or _names_a_dtype(eqn.params):
            return How.ORIGINAL, "mixed dtypes as written", kept
        if name in ONE_TO_ONE and len(eqn.invars) == len(eqn.outvars):
            return How.EACH, "follows each operand", together
        if found.rule is use_widest_precision:
            return How.WIDEST, _source(found), together if together in (FREE, LOW) and len(set(floats)) == 1 else kept
        if name in INTO_BUFFER:
            return How.BUFFER, "follows the buffer", LOW if ins[0] is LOW else FREE if together is LOW else together
        if together is LOW:
            return How.FOLLOW, "follows a low operand", LOW
        return How.ORIGINAL, self._why_not_low(eqn.invars, ins, together), together

    def _why_not_low(self, invars: Sequence[Any], ins: Sequence[Standing], together: Standing) -> str:
        literals = [v.val for v, s in zip(invars, ins, strict=True) if isinstance(v, Literal) and s is together]
        if together in (EXACT, WIDE) and literals:
            fate = "underflows in" if together is EXACT else "is beyond"
            return f"literal {float(literals[0]):g} {fate} {self.compute_dtype.name}"
        return _WHY_NOT_LOW[together]

    def _decide_cast(self, eqn: Any, operand: Standing) -> tuple[How, str, Standing]:
        """Casts that the user wrote, and the way from integers to floats."""
        old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"]) if _is_numpy(eqn) else None
        if new is None or not jnp.issubdtype(new, jnp.floating):
            return How.ORIGINAL, "not a float", FREE
        if not jnp.issubdtype(old, jnp.floating):
            return How.ORIGINAL, "made from positions" if operand is POSITION else "no low operand", operand
        if old == new:
            return How.ALIAS, "follows its operand", operand
        if new == self.compute_dtype:
            return How.ALIAS, "the user's cast", LOW
        if new.itemsize > old.itemsize:
            return How.ORIGINAL, "the user's cast to a wider dtype", max(operand, EXACT)
        return How.ORIGINAL, "the user's cast", operand

    def _decide_attention(self, eqn: Any, ins: list[Standing], found: Found) -> tuple[How, str, Standing]:
        """By the operands that are multiplied. A bias may be a position."""
        part, _ = takes_part(eqn.primitive, eqn.params)
        operands = [v for v, own in zip(eqn.invars, part, strict=True) if own]
        ins = [s for s, own in zip(ins, part, strict=True) if own]
        if not any(map(self.may_lower, operands)):
            return How.ORIGINAL, "nothing to lower", combine(ins)
        refusal = self._refuses(eqn, operands, ins)
        if refusal is not None:
            return How.ORIGINAL, refusal, EXACT
        if found.rule is use_compute_precision or combine(ins) is LOW:
            return How.LOW, _source(found), LOW
        return How.ORIGINAL, _WHY_NOT_LOW[combine(ins)], EXACT

    def _refuses(self, eqn: Any, invars: Sequence[Any], ins: list[Standing]) -> str | None:
        """Why an equation under the compute rule is not lowered after all; None if it is."""
        params = eqn.params
        dtypes = [float_dtype(v.aval) for v in invars]
        ours = [d is None or d == self.compute_dtype or may_lower(d, self.compute_dtype) for d in dtypes]
        if not all(ours) or ("preferred_element_type" in params and any(d is None for d in dtypes[:2])):
            return "mixed dtypes as written"
        preferred = params.get("preferred_element_type")
        if preferred is not None and not may_lower(np.dtype(preferred), self.compute_dtype):
            return "another result dtype as written"
        worst = max((s for s, v in zip(ins, invars, strict=True) if isinstance(v, Literal)), default=FREE)
        if worst is not FREE:
            return self._why_not_low(invars, ins, worst)
        if any(s is POSITION for s, d in zip(ins, dtypes, strict=True) if d is not None):
            return "made from positions"
        if _asks_for_precision(params.get("precision")):
            return "asks for precision"
        if eqn.primitive is lax.dot_general_p and not params["dimension_numbers"][0][0]:
            return _OUTER
        return None

    # -- higher-order equations

    def _enter(self, eqn: Any, entry: Entry, ins: list[Standing], path: Path, found: Found) -> Verdict:
        """Judge the bodies. A carry is exact; where the policy lets it follow, low if a round makes it low."""
        low_carries = _is_by_primitive(found) and found.rule is use_inferred_precision
        into = list(ins)
        for operand, _ in entry.carries:
            if float_dtype(eqn.invars[operand].aval) is None:
                into[operand] = standing_of_argument(eqn.invars[operand].aval)
            else:
                into[operand] = into[operand] if low_carries else max(EXACT, into[operand])
        while True:
            results: list[list[Standing]] = [[] for _ in eqn.outvars]
            for body in entry.bodies:
                _, outs = self.read(body.jaxpr, tuple(into[i] for i in body.operands), path)
                for result, standing in zip(body.results, outs, strict=bool(body.results)):
                    results[result].append(standing)
            settled = True
            for operand, result in entry.carries:
                if float_dtype(eqn.invars[operand].aval) is None:
                    continue
                after = combine([into[operand], *results[result]])
                if after is not into[operand]:
                    into[operand], settled = after, False
                results[result] = [into[operand]]
            if settled:
                break
        outs = tuple(map(combine, results))
        bodies = tuple(tuple(into[i] for i in body.operands) for body in entry.bodies)
        pinned = isinstance(found.key, str) and found.rule is use_original_precision
        return Verdict(How.ENTER, _source(found) if pinned else ENTERED, outs, found, entry, bodies)

    def outs_of_rule(self, eqn: Any, ins: Sequence[Value], rule: Rule) -> tuple[Value, ...]:
        """Run a user's rule on abstract operands to learn the dtypes of the results."""
        avals = [
            v.aval.update(dtype=i.dtype) if i.dtype is not None else v.aval
            for v, i in zip(eqn.invars, ins, strict=True)
        ]
        try:
            found = jax.make_jaxpr(lambda *xs: apply_rule(rule, self.compute_dtype, eqn, xs))(*avals).out_avals
        except NameError:  # a collective outside of its mesh: the run casts the results to what is planned here
            found = [v.aval for v in eqn.outvars]
        return tuple(
            Value(
                FREE if (dtype := float_dtype(aval)) is None else LOW if dtype == self.compute_dtype else EXACT,
                dtype,
            )
            for aval in found
        )


def apply_rule(rule: Rule, compute_dtype: np.dtype, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Bind `eqn` with the operands and parameters that a user's rule makes of it."""
    params = eqn.primitive.get_bind_params(eqn.params)
    dtypes = [getattr(v.aval, "dtype", None) for v in eqn.invars]
    made = rule(compute_dtype, dtypes, *operands, **params)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise TypeError(
            f"the rule {name_of_rule(rule)!r} returned {type(made).__name__} for {eqn.primitive}; expected a pair "
            "(invars, bind_params). Write `return invars, bind_params`."
        )
    invars, params = list(made[0]), made[1]
    if len(invars) != len(operands):
        raise TypeError(
            f"the rule {name_of_rule(rule)!r} returned {len(invars)} operands for {eqn.primitive}; expected "
            f"{len(operands)}, one for each that it was given. Return the operands that it leaves alone as well."
        )
    out = eqn.primitive.bind(*invars, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


_KNOWN = (use_compute_precision, use_inferred_precision, use_original_precision, use_widest_precision)
ENTERED = "entered"
_OUTER = "an outer product"
_SMALL = 2**20  # entries of an array that are looked at while tracing
_WHY_NOT_LOW = {
    FREE: "no low operand",
    EXACT: "follows a float32 operand",
    WIDE: "follows an operand out of range",
    POSITION: "made from positions",
}


def _is_by_primitive(found: Found) -> bool:
    return found.key is not None and not isinstance(found.key, str)


def _standing_of_integers(eqn: Any, ins: Sequence[Standing]) -> Standing:
    """Of integers among the results: what is moved or cast stays what it was, what is computed may count places."""
    if eqn.primitive is lax.convert_element_type_p:
        old = eqn.invars[0].aval
        return ins[0] if is_wide_integer(old) else POSITION if float_dtype(old) is not None else FREE
    if eqn.primitive.name in MOVES - PLACES:
        return combine(s for s, v in zip(ins, eqn.invars, strict=True) if is_wide_integer(v.aval))
    return POSITION


def _is_small_and_here(array: jax.Array) -> bool:
    return not isinstance(array, jax.core.Tracer) and array.is_fully_addressable and array.size <= _SMALL


def _keeps_out(found: Found) -> bool:
    """Whether a key names a higher-order primitive, and so is about the equation as a whole, not about its inside."""
    return _is_by_primitive(found) and (found.rule is use_original_precision or found.rule not in _KNOWN)


def name_of_rule(rule: Rule) -> str:
    return getattr(rule, "__name__", type(rule).__name__)


def _source(found: Found) -> str:
    if found.key is None:
        return "default"
    if isinstance(found.key, Primitive):
        return "policy table"
    return f"scope {found.key!r}" if isinstance(found.key, str) else f"scope {found.key[0]!r} and primitive"


def _takes_any_dtype(atom: Any, standing: Standing) -> bool:
    return standing is FREE and isinstance(atom, Literal)


def _is_numpy(eqn: Any) -> bool:
    return isinstance(eqn.params["new_dtype"], np.dtype | type) and isinstance(eqn.invars[0].aval.dtype, np.dtype)


def _rounds_nothing(eqn: Any) -> bool:
    """A `reduce_precision` to all the bits of its operand: the mark that `jax.checkpoint` sets on what it saves."""
    if eqn.primitive is not lax.reduce_precision_p:
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    return eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant


def _names_a_dtype(params: dict[str, Any]) -> bool:
    return any(params.get(name) is not None for name in ("out_dtype", "dtype"))


def _asks_for_precision(precision: Any) -> bool:
    """`HIGHEST`, or a named algorithm. `HIGH` is how a global TF32 setting looks: no request."""
    if precision is None:
        return False
    if isinstance(precision, tuple):
        return any(map(_asks_for_precision, precision))
    return precision not in (lax.Precision.DEFAULT, lax.Precision.HIGH)

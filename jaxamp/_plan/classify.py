"""How sensitive each value of a jaxpr is, and from that a decision on each equation.

A table per primitive can't say both "an add between two matmuls is low" and "an add after exp is float32". So the
jaxpr is read forwards, and each equation is decided by its rule in the policy and by the sensitivities of its operands
(`sensitivity.py`). A nested jaxpr is read with the sensitivities of its operands; a loop's carry enters its body as
protected.
"""

import enum
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Var, consts_of, is_of_jax_image, open_jaxpr, scopes
from .._formats import Formats, float_dtype, is_float_dtype, is_integer, is_wide_integer, may_lower
from .._jaxpr import Kinds, Memo
from .._policy.load import load_policy
from .._policy.lookup import Found, Lookup
from .._policy.rules import (
    ReplacingRule,
    use_compute_precision,
    use_inferred_precision,
    use_original_precision,
    use_widest_precision,
)
from .._primitives.matmul import has_mixed, is_mixed
from .._primitives.quantized_matmul import is_quantized
from .._traits import traits_of
from .._traits.matmul_cost import is_outer_product
from .bodies import Body, Entry
from .higher_order import describe
from .magnified import Magnified
from .reasons import Reason, Why, by_policy
from .sensitivity import (
    FREE,
    LOW,
    OUT_OF_RANGE,
    POSITION,
    PROTECTED,
    Sensitivity,
    Value,
    combine,
    sensitivity_of_argument,
    sensitivity_of_constant,
)
from .user_rules import results_of_rule

Path = tuple[str, ...]  # named scopes, outermost first


class Mode(enum.Enum):
    """How an equation gets its dtypes."""

    AS_WRITTEN = "as written"
    LOW = "in the compute dtype"
    FOLLOW = "in the compute dtype, unless only float32 operations read its result"
    WIDEST = "in the widest dtype of its operands"
    EACH = "each operand in the dtype it is held in"
    BUFFER = "in the dtype of its first operand"
    ALIAS = "a cast that has nothing to do"
    CONSTANT = "a literal, broadcast in the dtype that its reader wants"
    RULE = "as a user's rule says"
    ENTER = "its bodies are planned"


class Decision(NamedTuple):
    """How an equation runs, why, and the sensitivities of its results."""

    mode: Mode
    reason: Reason
    outs: tuple[Sensitivity, ...]
    found: Found
    entry: Entry | None = None
    bodies: tuple[tuple[Sensitivity, ...], ...] = ()  # of the operands of each body of `entry`
    magnified: tuple[bool, ...] = ()  # which results a decomposition or a solve reads; empty: none


class Classifier:
    """Decides on the equations of jaxprs, with a memory that lasts for one trace."""

    def __init__(self, lookup: Lookup, formats: Formats):
        self.lookup = lookup
        self.formats = formats
        self.kinds = Kinds()
        self._decisions = Memo()
        self._constants = Memo()
        self._alike: dict[Hashable, Decision] = {}  # on equations of a kind
        self._magnified = Magnified()

    # -- values

    def value(self, sensitivity: Sensitivity, aval: Any) -> Value:
        """A value of this sensitivity, in the format that goes with it."""
        dtype = float_dtype(aval)
        lowers = sensitivity is LOW and may_lower(dtype, self.formats.compute_dtype)
        return Value(sensitivity, self.formats.low if lowers else self.formats.of(dtype))

    def of_constant(self, const: Any) -> Sensitivity:
        """The sensitivity of a constant. Large arrays, and those of outer traces, are treated like arguments."""
        aval = jax.typeof(const)
        if not (float_dtype(aval) is not None or is_wide_integer(aval)):
            return FREE
        if isinstance(const, jax.Array) and not _is_small_and_here(const):
            return sensitivity_of_argument(aval)
        compute_dtype = self.formats.compute_dtype
        return self._constants.get(const, None, lambda: sensitivity_of_constant(const, compute_dtype))

    def _is_low(self, dtype: np.dtype) -> bool:
        format_ = self.formats.of(dtype)
        return format_ is not None and format_.low

    def _is_ours(self, atom: Any, found: Found) -> bool:
        """Whether a rule may change how a float is rounded. A replacement also takes operands that are low already."""
        if self.formats.may_lower(atom):
            return True
        dtype = float_dtype(atom.aval)
        return isinstance(found.rule, ReplacingRule) and dtype is not None and self._is_low(dtype)

    def _is_kept_low(self, preferred: Any, dtypes: Sequence[np.dtype | None]) -> bool:
        """Whether a matmul of low operands asks for a low result."""
        return self._is_low(np.dtype(preferred)) and all(d is None or self._is_low(d) for d in dtypes)

    def of_constants(self, jaxpr: Jaxpr) -> dict[Var, Sensitivity]:
        pairs = zip(open_jaxpr(jaxpr).constvars, consts_of(jaxpr), strict=True)
        return {var: self.of_constant(const) for var, const in pairs}

    # -- decisions

    def read(
        self, jaxpr: Jaxpr, ins: tuple[Sensitivity, ...], path: Path, magnified: tuple[bool, ...] = ()
    ) -> tuple[list[Decision], tuple[Sensitivity, ...]]:
        """A decision on each equation, and the sensitivities of the results, for operands of sensitivities `ins`.

        `magnified`: which results a decomposition or a solve reads; empty: none.
        """
        return self._decisions.get(jaxpr, (ins, path, magnified), lambda: self._read(jaxpr, ins, path, magnified))

    def _read(
        self, jaxpr: Jaxpr, ins: tuple[Sensitivity, ...], path: Path, magnified: tuple[bool, ...]
    ) -> tuple[list[Decision], tuple[Sensitivity, ...]]:
        solved = self._magnified.within(jaxpr, magnified)
        env: dict[Var, Sensitivity] = self.of_constants(jaxpr)
        env.update(zip(open_jaxpr(jaxpr).invars, ins, strict=True))

        def read(atom: Any) -> Sensitivity:
            return self.of_constant(atom.val) if isinstance(atom, Literal) else env[atom]

        decisions: list[Decision] = []
        resizes = is_of_jax_image(jaxpr) and bool({LOW, PROTECTED}.intersection(ins))
        for eqn, kind in zip(open_jaxpr(jaxpr).eqns, self.kinds.of(jaxpr), strict=True):
            inner = path + scopes(eqn.source_info.name_stack)
            known = tuple([env[v] for v in eqn.invars if not isinstance(v, Literal)])
            key = kind, known, inner, resizes, tuple([v in solved for v in eqn.outvars]) if solved else ()
            decision = self._alike.get(key)
            if decision is None:
                operands = [read(v) for v in eqn.invars]
                asked = _interpolated(eqn, operands) if resizes else (eqn, operands)
                decision = self._alike[key] = self._decide(*asked, inner, solved)
            env.update(zip(eqn.outvars, decision.outs, strict=True))
            decisions.append(decision)
        return decisions, tuple(read(v) for v in open_jaxpr(jaxpr).outvars)

    def _decide(self, eqn: Any, ins: list[Sensitivity], path: Path, solved: frozenset[Var]) -> Decision:
        found = self.lookup(path, eqn.primitive)
        is_wide = traits_of(eqn.primitive).sums_devices and found == Found(use_original_precision, eqn.primitive)
        if is_wide and self.lookup.communication(path).reduce != "float32":  # a word about such sums, before their rule
            found = Found(use_inferred_precision, eqn.primitive)
        entry = describe(eqn)
        if entry is not None and not _keeps_out(found):
            read_by_solve = self._magnified.results(eqn, entry, solved)
            if entry.lazy and any(read_by_solve):
                return _not_entered_for_solve(eqn, found)
            return self._enter(eqn, entry, ins, path, found, read_by_solve)
        mode, reason, sensitivity = self._decide_plain(eqn, ins, found)
        magnified: tuple[bool, ...] = ()
        if mode is Mode.LOW and has_mixed(eqn.primitive) and solved.issuperset(eqn.outvars):
            reason, sensitivity, magnified = Reason(Why.READ_BY_SOLVE, reason), PROTECTED, (True,)
        if mode is Mode.EACH:
            return Decision(mode, reason, tuple(ins), found)
        floats = [sensitivity] * len(eqn.outvars)
        if mode is Mode.RULE:
            values = [self.value(s, v.aval) for s, v in zip(ins, eqn.invars, strict=True)]
            floats = [value.sensitivity for value in results_of_rule(found.rule, self.formats, eqn, values)]
        takes_part = traits_of(eqn.primitive).takes_part
        if mode is Mode.LOW and takes_part is not None:
            floats = [LOW if part else PROTECTED for part in takes_part(eqn.params)[1]]
        integers = _sensitivity_of_integers(eqn, ins)
        outs = tuple(
            s if float_dtype(v.aval) is not None else integers if is_wide_integer(v.aval) else FREE
            for s, v in zip(floats, eqn.outvars, strict=True)
        )
        return Decision(mode, reason, outs, found, magnified=magnified)

    def _decide_plain(self, eqn: Any, ins: list[Sensitivity], found: Found) -> tuple[Mode, Reason, Sensitivity]:
        """How an equation without bodies runs, why, and the sensitivity of its float results.

        The guards come first: what a user's rule says, casts, positions, operations of a fixed dtype. Then the rule of
        the policy is followed, and last the neighbours.
        """
        name, traits = eqn.primitive.name, traits_of(eqn.primitive)
        floats = [
            min(sensitivity, PROTECTED) if _is_bound(eqn, atom) else sensitivity
            for sensitivity, atom in zip(ins, eqn.invars, strict=True)
            if float_dtype(atom.aval) is not None and not _takes_any_dtype(atom, sensitivity)
        ]
        together = combine(floats)
        if not traits.keeps_range and together > PROTECTED:
            together = PROTECTED
        kept = together if together > PROTECTED else PROTECTED
        if is_mixed(eqn.primitive) or is_quantized(eqn.primitive):
            return Mode.AS_WRITTEN, Reason(Why.ALREADY_LOW), LOW
        if not _is_known(found):
            return Mode.RULE, by_policy(found), kept
        if eqn.primitive is lax.convert_element_type_p:
            return self._decide_cast(eqn, ins[0])
        if traits.makes_positions:
            return Mode.AS_WRITTEN, Reason(Why.FROM_POSITIONS), POSITION
        reads_floats = any(map(self.formats.may_lower, eqn.invars))
        if found.rule is use_original_precision:
            unknown = found.key is None and not traits.fixed_dtype and reads_floats
            return Mode.AS_WRITTEN, Reason(Why.NOT_ENTERED, name) if unknown else by_policy(found), kept
        if traits.takes_part is not None:
            return self._decide_by_parts(eqn, ins, found)
        if traits.fixed_dtype and not _rounds_nothing(eqn):
            return Mode.AS_WRITTEN, Reason(Why.FIXED_DTYPE, name), kept
        if not _is_by_primitive(found) and eqn.primitive not in load_policy("default"):
            return Mode.AS_WRITTEN, Reason(Why.NOT_ENTERED, name) if reads_floats else by_policy(found), kept
        if traits.moves and together is FREE and all(isinstance(v, Literal) for v in eqn.invars):
            return Mode.CONSTANT, Reason(Why.CONSTANT), FREE
        mine = [self._is_ours(v, found) for v in eqn.invars if float_dtype(v.aval) is not None]
        if not any(mine):
            widens = any(map(self.formats.may_lower, eqn.outvars))  # asked for by `preferred_element_type`
            return Mode.AS_WRITTEN, Reason(Why.NOTHING_TO_LOWER), kept if floats and widens else together
        if _lowers(found):
            refusal = self._refuses(eqn, eqn.invars, ins)
            if refusal is None:
                return Mode.LOW, by_policy(found), LOW
            if refusal.why is not Why.OUTER_PRODUCT:
                return Mode.AS_WRITTEN, refusal, kept
        if not all(mine) or _names_a_dtype(eqn.params):
            return Mode.AS_WRITTEN, Reason(Why.MIXED_DTYPES), kept
        if traits.pairwise and len(eqn.invars) == len(eqn.outvars):
            return Mode.EACH, Reason(Why.FOLLOWS_EACH), together
        if found.rule is use_widest_precision:
            same = together in (FREE, LOW) and len(set(floats)) == 1
            return Mode.WIDEST, by_policy(found), together if same else kept
        if traits.writes_buffer:
            sensitivity = LOW if ins[0] is LOW else FREE if together is LOW else together
            return Mode.BUFFER, Reason(Why.FOLLOWS_BUFFER), sensitivity
        if together is LOW:
            return Mode.FOLLOW, Reason(Why.FOLLOWS_LOW), LOW
        return Mode.AS_WRITTEN, self._why_not_low(eqn.invars, ins, together), together

    def _why_not_low(self, invars: Sequence[Any], ins: Sequence[Sensitivity], together: Sensitivity) -> Reason:
        literals = [v.val for v, s in zip(invars, ins, strict=True) if isinstance(v, Literal) and s is together]
        if together in (PROTECTED, OUT_OF_RANGE) and literals:
            why = Why.LITERAL_UNDERFLOWS if together is PROTECTED else Why.LITERAL_OVERFLOWS
            return Reason(why, (float(literals[0]), self.formats.compute_dtype.name))
        return Reason(_WHY_NOT_LOW[together])

    def _decide_cast(self, eqn: Any, operand: Sensitivity) -> tuple[Mode, Reason, Sensitivity]:
        """Casts that the user wrote, and conversions of integers to floats."""
        old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"]) if _is_numpy(eqn) else None
        if new is None or not is_float_dtype(new):
            return Mode.AS_WRITTEN, Reason(Why.NOT_A_FLOAT), FREE
        if not is_float_dtype(old):
            why = Why.FROM_POSITIONS if operand is POSITION else Why.NO_LOW_OPERAND
            return Mode.AS_WRITTEN, Reason(why), operand
        if old == new:
            return Mode.ALIAS, Reason(Why.FOLLOWS_OPERAND), operand
        if self._is_low(new):
            return Mode.ALIAS, Reason(Why.USERS_CAST), LOW
        if new.itemsize > old.itemsize:
            return Mode.AS_WRITTEN, Reason(Why.USERS_WIDER_CAST), max(operand, PROTECTED)
        return Mode.AS_WRITTEN, Reason(Why.USERS_CAST), operand

    def _decide_by_parts(self, eqn: Any, ins: list[Sensitivity], found: Found) -> tuple[Mode, Reason, Sensitivity]:
        """An operation such as attention, by the operands that are multiplied. The others may be positions."""
        takes_part = traits_of(eqn.primitive).takes_part
        assert takes_part is not None
        multiplied, _ = takes_part(eqn.params)
        operands = [v for v, is_multiplied in zip(eqn.invars, multiplied, strict=True) if is_multiplied]
        ins = [s for s, is_multiplied in zip(ins, multiplied, strict=True) if is_multiplied]
        if not any(self._is_ours(v, found) for v in operands):
            return Mode.AS_WRITTEN, Reason(Why.NOTHING_TO_LOWER), combine(ins)
        refusal = self._refuses(eqn, operands, ins)
        if refusal is not None:
            return Mode.AS_WRITTEN, refusal, PROTECTED
        if _lowers(found) or combine(ins) is LOW:
            return Mode.LOW, by_policy(found), LOW
        return Mode.AS_WRITTEN, Reason(_WHY_NOT_LOW[combine(ins)]), PROTECTED

    def _refuses(self, eqn: Any, invars: Sequence[Any], ins: list[Sensitivity]) -> Reason | None:
        """Why an equation under the compute rule is not lowered after all; None if it is."""
        params, low = eqn.params, self.formats.compute_dtype
        dtypes = [float_dtype(v.aval) for v in invars]
        ours = [d is None or self._is_low(d) or may_lower(d, low) for d in dtypes]
        if not all(ours) or not all(d is not None or is_integer(v.aval) for d, v in zip(dtypes[:2], invars)):
            return Reason(Why.MIXED_DTYPES)
        preferred = params.get("preferred_element_type")
        if preferred is not None and not (may_lower(np.dtype(preferred), low) or self._is_kept_low(preferred, dtypes)):
            return Reason(Why.OTHER_RESULT_DTYPE)
        worst = max((s for s, v in zip(ins, invars, strict=True) if isinstance(v, Literal)), default=FREE)
        if worst is not FREE:
            return self._why_not_low(invars, ins, worst)
        if any(s is POSITION for i, (s, d) in enumerate(zip(ins, dtypes, strict=True)) if d is not None or i < 2):
            return Reason(Why.FROM_POSITIONS)
        if _asks_for_precision(params.get("precision")):
            return _who_asks(params["precision"])
        if is_outer_product(eqn):
            return Reason(Why.OUTER_PRODUCT)
        return None

    # -- higher-order equations

    def _enter(
        self,
        eqn: Any,
        entry: Entry,
        ins: list[Sensitivity],
        path: Path,
        found: Found,
        magnified: tuple[bool, ...],
    ) -> Decision:
        """Read the bodies. A carry is protected; where the policy lets it follow, it is low if a round makes it low."""
        low_carries = _is_by_primitive(found) and found.rule is use_inferred_precision
        into = list(ins)
        for operand, _ in entry.carries:
            if float_dtype(eqn.invars[operand].aval) is None:
                into[operand] = sensitivity_of_argument(eqn.invars[operand].aval)
            else:
                into[operand] = into[operand] if low_carries else max(PROTECTED, into[operand])
        while True:
            results: list[list[Sensitivity]] = [[] for _ in eqn.outvars]
            for body in entry.bodies:
                sensitivities = tuple(into[i] for i in body.operands)
                _, outs = self.read(body.jaxpr, sensitivities, path, results_of(body, magnified))
                for result, sensitivity in zip(body.results, outs, strict=bool(body.results)):
                    results[result].append(sensitivity)
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
        reason = by_policy(found) if pinned else Reason(Why.ENTERED)
        return Decision(Mode.ENTER, reason, outs, found, entry, bodies, magnified)


def _interpolated(eqn: Any, ins: list[Sensitivity]) -> tuple[Any, list[Sensitivity]]:
    """An equation of `jax.image.resize`, as if its matmuls asked for no precision and had ordinary weights.

    They all ask for `HIGHEST`. Their weights are made from positions, but are none: those of a pixel add up to one.
    """
    if not traits_of(eqn.primitive).matmul:
        return eqn, ins
    return eqn.replace(params={**eqn.params, "precision": None}), [min(s, PROTECTED) for s in ins]


def _not_entered_for_solve(eqn: Any, found: Found) -> Decision:
    """A user's rule multiplies the cotangent of a solve with what it saved: all of that must fit together."""
    reason = Reason(Why.READ_BY_SOLVE, Reason(Why.NOT_ENTERED, eqn.primitive.name))
    avals = [v.aval for v in eqn.outvars]
    outs = (sensitivity_of_argument(a) if float_dtype(a) is None else PROTECTED for a in avals)
    return Decision(Mode.AS_WRITTEN, reason, tuple(outs), found)


def results_of(body: Body, magnified: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which results of a body a decomposition or a solve reads; empty: none."""
    inside = tuple(magnified[r] for r in body.results)
    return inside if any(inside) else ()


_SMALL = 2**20  # entries of a constant array that are looked at while tracing
_WHY_NOT_LOW = {
    FREE: Why.NO_LOW_OPERAND,
    PROTECTED: Why.FOLLOWS_PROTECTED,
    OUT_OF_RANGE: Why.FOLLOWS_OUT_OF_RANGE,
    POSITION: Why.FROM_POSITIONS,
}

_KNOWN = (use_compute_precision, use_inferred_precision, use_original_precision, use_widest_precision)


def _is_known(found: Found) -> bool:
    """Whether the planner decides for a rule; any other rule is a user's, and has the last word."""
    return isinstance(found.rule, ReplacingRule) or found.rule in _KNOWN


def _lowers(found: Found) -> bool:
    return isinstance(found.rule, ReplacingRule) or found.rule is use_compute_precision


def _is_by_primitive(found: Found) -> bool:
    return found.key is not None and not isinstance(found.key, str)


def _keeps_out(found: Found) -> bool:
    """Whether a key names a higher-order primitive, and so is about the equation as a whole, not about its bodies."""
    return _is_by_primitive(found) and (found.rule is use_original_precision or found.rule not in _KNOWN)


def _sensitivity_of_integers(eqn: Any, ins: Sequence[Sensitivity]) -> Sensitivity:
    """Of integers among the results: moved or cast ones stay what they were, computed ones may count places."""
    if eqn.primitive is lax.convert_element_type_p:
        old = eqn.invars[0].aval
        return ins[0] if is_wide_integer(old) else POSITION if float_dtype(old) is not None else FREE
    traits = traits_of(eqn.primitive)
    if traits.moves and not traits.returns_indices:
        return combine(s for s, v in zip(ins, eqn.invars, strict=True) if is_wide_integer(v.aval))
    return POSITION


def _is_small_and_here(array: jax.Array) -> bool:
    return not isinstance(array, jax.core.Tracer) and array.is_fully_addressable and array.size <= _SMALL


def _is_bound(eqn: Any, atom: Any) -> bool:
    """Whether it is a large constant that only bounds a result, such as the largest float: results are not like it."""
    if not isinstance(atom, Literal) or np.ndim(atom.val):
        return False
    above, below = eqn.primitive is lax.min_p and atom.val > 0, eqn.primitive is lax.max_p and atom.val < 0
    return above or below or eqn.primitive is lax.clamp_p


def _takes_any_dtype(atom: Any, sensitivity: Sensitivity) -> bool:
    return sensitivity is FREE and isinstance(atom, Literal)


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


def _who_asks(precision: Any) -> Reason:
    """The global setting, if it asks for just this precision; else the operation, or a `with` around it."""
    setting = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    asked = precision
    if isinstance(precision, tuple):
        asked = next(filter(_asks_for_precision, precision))
    if setting is not None and str(asked) == str(_precision_named(setting)):
        return Reason(Why.SETTING_ASKS_FOR_PRECISION, setting)
    return Reason(Why.ASKS_FOR_PRECISION, getattr(asked, "name", str(asked)))


def _precision_named(setting: str) -> Any:
    try:
        return lax.Precision(setting)
    except ValueError:  # the name of an algorithm
        return getattr(lax.DotAlgorithmPreset, setting, None)


def _asks_for_precision(precision: Any) -> bool:
    """Whether it is `HIGHEST` or a named algorithm. A global TF32 setting looks like `HIGH`, which asks for nothing."""
    if precision is None:
        return False
    if isinstance(precision, tuple):
        return any(map(_asks_for_precision, precision))
    return precision not in (lax.Precision.DEFAULT, lax.Precision.HIGH)

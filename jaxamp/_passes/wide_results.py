"""Let matmuls whose results are only returned give them in the dtype that the user's function returns.

Rounding a result that is widened again right away saves nothing: the accumulator holds it in float32. A matmul with
another body is left alone: the transpose of a plain matmul with a float32 result is a float32 matmul.
"""

from typing import Any

from .._compat import Literal, Var, open_jaxpr
from .._formats import Format
from .._plan.classify import Mode
from .._plan.plan import Plan, Reader, Step, only_returned
from .._plan.reasons import Reason, Why
from .._plan.sensitivity import Value
from .._plan.user_rules import results_of_rule
from .._policy.rules import Replacement
from .._primitives.matmul import has_mixed


def widen_results(plan: Plan) -> Plan:
    """Widen the results of low matmuls that are returned, as they are or rearranged, and read by nothing else."""
    if not any(plan.returned) or not any(step.mode is Mode.LOW for step in plan.steps):
        return plan
    through, readers = only_returned(open_jaxpr(plan.jaxpr), plan.returned), dict[Var, list[Reader]]()
    wider: dict[Var, Value] = {}
    changed: dict[int, Step] = {}
    for i, (eqn, step) in enumerate(zip(plan.eqns, plan.steps, strict=True)):
        if not through.issuperset(eqn.outvars) or not eqn.outvars:
            continue
        if step.mode is Mode.LOW and has_mixed(eqn.primitive) and not isinstance(step.found.rule, Replacement):
            changed[i] = _widened(step, plan.setting.formats.of_aval(eqn.outvars[0].aval))
        elif any(not isinstance(v, Literal) and v in wider for v in eqn.invars):
            readers = readers or plan.readers()
            changed[i] = _following(plan, i, wider, readers)
        if i in changed and changed[i].outs != step.outs:
            wider.update(zip(eqn.outvars, changed[i].outs, strict=True))
    outs = (value if isinstance(v, Literal) else wider.get(v, value) for v, value in _results(plan))
    return plan.with_steps(changed)._replace(outs=tuple(outs)) if changed else plan


def _results(plan: Plan) -> list[tuple[Any, Value]]:
    return list(zip(open_jaxpr(plan.jaxpr).outvars, plan.outs, strict=True))


def _widened(step: Step, format_: Format | None) -> Step:
    assert format_ is not None
    params = {**(step.params or {}), "preferred_element_type": format_.dtype}
    return step._replace(outs=tuple(Value(o.sensitivity, format_) for o in step.outs), params=params)


def _following(plan: Plan, i: int, wider: dict[Var, Value], readers: dict[Var, list[Reader]]) -> Step:
    """The step of an operation that rearranges a result that is wider now."""
    eqn, step, formats = plan.eqns[i], plan.steps[i], plan.setting.formats
    if step.mode is Mode.RULE:
        ins = [wider.get(v, Value(step.outs[0].sensitivity, formats.of_aval(v.aval))) for v in eqn.invars]
        return step._replace(outs=results_of_rule(step.found.rule, formats, eqn, ins))
    if step.mode not in (Mode.FOLLOW, Mode.WIDEST):
        return step
    if step.mode is Mode.FOLLOW and not _is_wanted_wide(plan, eqn.outvars[0], readers):
        return step
    outs = tuple(Value(o.sensitivity, formats.of_aval(v.aval)) for v, o in plan.values_of(i))
    reads = tuple(formats.of_aval(v.aval) for v in eqn.invars)
    reason = step.reason if step.mode is Mode.WIDEST else Reason(Why.READ_ONLY_BY, _readers(plan, eqn.outvars[0]))
    return step._replace(reads=reads, outs=outs, params=None, reason=reason, touched=False)


def _is_wanted_wide(plan: Plan, var: Var, readers: dict[Var, list[Reader]]) -> bool:
    """Whether nothing that reads a variable, through operations that follow it, asks for a low one."""
    for place in (reader.place for reader in readers.get(var, ()) if reader.place < len(plan.steps)):
        mode = plan.steps[place].mode
        if mode not in (Mode.FOLLOW, Mode.WIDEST, Mode.AS_WRITTEN):
            return False
        if mode is not Mode.AS_WRITTEN and not _is_wanted_wide(plan, plan.eqns[place].outvars[0], readers):
            return False
    return True


def _readers(plan: Plan, var: Var) -> tuple[str, ...]:
    return tuple(dict.fromkeys(eqn.primitive.name for eqn in plan.eqns if any(v is var for v in eqn.invars)))

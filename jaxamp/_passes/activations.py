"""Keep what an activation between two matmuls makes, in place of what it reads.

    relu(x @ v + b) @ w        tanh(x @ v + b) @ w

The gradient of `w` needs the result of the activation, and its derivative can be read off the result, too. From
`x @ v`, the backward pass would make the result again and write it for the matmul, and for a tanh it would make the
cotangent apart from the sum for the bias, because XLA does not compute a tanh twice. Nothing is less exact: JAX's own
derivative of a tanh reads the result, in the same dtype, and that of a relu the sign, which is that of the result.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax

from .._compat import Literal, Var, is_of_jax_nn
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Readers, Runner, map_steps
from .._primitives import activations
from .._traits import traits_of
from .._traits.matmul_cost import size_of


def keep_activations(plan: Plan) -> Plan:
    """Let activations between low matmuls have derivatives of their results, which are kept."""
    if not plan.touched or plan.setting.keep == "all":
        return plan
    both = ((i, _activation(plan, i)) for i in plan.parts if isinstance(i, int))
    found = {i: fun for i, fun in both if fun is not None}
    if not found:
        return plan
    readers, made = plan.readers(), {v: i for i, eqn in enumerate(plan.eqns) for v in eqn.outvars}
    found = {i: fun for i, fun in found.items() if _is_between_matmuls(plan, i, readers, made)}
    return plan._replace(parts=map_steps(plan.parts, lambda i: Activation((i,), i, found[i]) if i in found else i))


class Activation(NamedTuple):
    """An activation whose result is kept."""

    parts: tuple[Part, ...]
    last: int
    fun: Callable[[Any], Any]

    def with_parts(self, parts: tuple[Part, ...]) -> "Activation":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        ((var, value),) = plan.values_of(self.last)
        with runner.at(plan, self.last):
            env.write(var, self.fun(env.read(plan.eqns[self.last].invars[0], plan.setting.formats.low)), value)


def _activation(plan: Plan, i: int) -> Callable[[Any], Any] | None:
    """The function to run in place of a step, if it is a tanh or a relu in low precision."""
    eqn, step = plan.eqns[i], plan.steps[i]
    if len(step.outs) != 1 or not step.outs[0].is_low or step.is_pinned or isinstance(eqn.invars[0], Literal):
        return None
    if eqn.primitive is lax.tanh_p:
        plain = step.mode is Mode.FOLLOW and eqn.params.get("accuracy") is None
        return activations.tanh if plain and step.operation is None else None
    return activations.relu if step.mode is Mode.ENTER and _is_relu(eqn, step) else None


def _is_relu(eqn: Any, step: Any) -> bool:
    """Whether it is JAX's own: that has a rule for its derivative, which is zero where its operand is."""
    while traits_of(eqn.primitive).own_jvp or traits_of(eqn.primitive).plain_call:
        if len(step.bodies) != 1 or not is_of_jax_nn(step.bodies[0].jaxpr):
            return False
        (body,) = step.bodies
        if len(body.eqns) != 1:
            return False
        eqn, step = body.eqns[0], body.steps[0]
    return eqn.primitive is lax.max_p and isinstance(eqn.invars[1], Literal) and eqn.invars[1].val == 0


def _is_between_matmuls(plan: Plan, i: int, readers: Readers, made: dict[Var, int]) -> bool:
    """Whether a matmul reads the result, and the operand is that of one, perhaps moved, with a bias."""
    last = len(plan.eqns)
    places = [reader.place for reader in readers.get(plan.eqns[i].outvars[0], [])]
    if not any(place < last and _is_plain_matmul(plan, place) for place in places):
        return False
    var = plan.eqns[i].invars[0]
    while var in made and len(readers[var]) == 1:
        eqn = plan.eqns[made[var]]
        traits, large = traits_of(eqn.primitive), [v for v in eqn.invars if size_of(v.aval) == size_of(var.aval)]
        if traits.matmul:
            return _is_plain_matmul(plan, made[var]) and plan.steps[made[var]].outs[0].is_low
        if not (traits.sum or traits.keeps_all_entries or traits.passes_on) or len(large) != 1:
            return False
        (var,) = large
    return False


def _is_plain_matmul(plan: Plan, i: int) -> bool:
    """Whether it is a matmul that keeps its operands as they are, and not in a format of its own."""
    return traits_of(plan.eqns[i].primitive).matmul and not plan.steps[i].replaced

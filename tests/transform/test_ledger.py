"""Numbers of steps, and the records behind them."""

import jax
import jax.numpy as jnp
from helpers import W, equations
from plans import plan_of

import jaxamp
from jaxamp._compat import marks_of
from jaxamp._plan.reasons import Why
from jaxamp._transform.ledger import Ledger


def test_a_step_has_one_number():
    plan, ledger = plan_of(lambda x: jnp.exp(x @ x), W), Ledger()
    numbers = [ledger.number(plan.steps, i, plan.eqns[i]) for i in (1, 0, 1)]
    assert numbers == [0, 1, 0]
    assert [record.eqn.primitive.name for record in ledger.records] == ["exp", "dot_general"]
    assert ledger.records[0].step is plan.steps[1]
    assert ledger.plans == [plan.steps]


def test_a_jaxpr_that_runs_as_written_carries_numbers_in_its_bodies():
    plan, ledger = plan_of(lambda x: jax.jit(lambda x: jnp.exp(x) + 1.0)(x), W), Ledger()
    jaxpr = ledger.jaxpr_of(plan)
    assert ledger.jaxpr_of(plan) is jaxpr
    marks = [marks_of(eqn.source_info.name_stack) for eqn in equations(jaxpr)]
    assert [len(found) for found in marks] == [1, 1, 1]
    names = [ledger.records[number].eqn.primitive.name for (number,) in marks]
    assert names == ["jit", "exp", "add"]


def test_bodies_that_a_key_keeps_out_share_the_step_around():
    policy = jaxamp.default_amp_policy | {jaxamp._compat.primitives()["jit"]: jaxamp.use_original_precision}
    plan, ledger = plan_of(lambda x: jax.jit(lambda x: x @ x)(x), W, policy=policy), Ledger()
    ledger.numbered(plan.eqns[0], plan.steps[0])
    (record,) = ledger.records
    assert record.eqn.primitive.name == "dot_general"
    assert (record.step.reason.why, record.step.reason.detail[0]) == (Why.INSIDE, "jit")

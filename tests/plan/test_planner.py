"""Plans: the formats that operands are read in and results are held in, and what planning costs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from helpers import W, raises
from jax import lax
from plans import held_in, plan_of, read_in, step

from jaxamp._formats import Formats
from jaxamp._plan.classify import Classifier
from jaxamp._plan.plan import Setting
from jaxamp._plan.planner import Planner, Want
from jaxamp._plan.reasons import Reason, Why
from jaxamp._plan.sensitivity import FREE, Value
from jaxamp._transform.options import check_options


def test_planning_shared_bodies_costs_no_more_than_their_number():
    reads = []
    fn = lambda x: jnp.tanh(x @ x)
    for _ in range(12):
        fn = jax.jit(lambda x, fn=fn: fn(fn(x)))

    class Counting(Planner):
        def _wants(self, *args):
            reads.append(1)
            return super()._wants(*args)

    options = check_options(jnp.bfloat16, "default")
    jaxpr, formats = jax.make_jaxpr(fn)(W), Formats(options.compute_dtype)
    planner = Counting(Classifier(options.lookup, formats), Setting(formats))
    planner.plan(jaxpr, [Value(FREE, formats.of(W.dtype))], [Want.WIDE], ())
    assert len(reads) < 100


def test_formats_of_a_matmul_and_what_follows():
    plan = plan_of(lambda w, x: jnp.exp(jnp.tanh(x @ w) @ w), W, W)
    assert read_in(step(plan, "dot_general")) == ["float32", "float32"]  # parameters are rounded inside
    assert held_in(step(plan, "dot_general")) == ["bfloat16"]
    assert (read_in(step(plan, "tanh")), held_in(step(plan, "tanh"))) == (["bfloat16"], ["bfloat16"])
    assert read_in(step(plan, "dot_general", 1)) == ["bfloat16", "float32"]
    assert (read_in(step(plan, "exp")), held_in(step(plan, "exp"))) == (["float32"], ["float32"])
    assert plan.touched


def test_what_only_float32_operations_read_is_float32():
    plan = plan_of(lambda x: jnp.exp(x @ x - 1.0), W)
    assert held_in(step(plan, "sub")) == ["float32"]
    assert step(plan, "sub").reason == Reason(Why.READ_ONLY_BY, ("exp",))
    plan = plan_of(lambda x: (lambda y: jnp.exp(y) @ (y @ x))(x @ x - 1.0), W)
    assert held_in(step(plan, "sub")) == ["bfloat16"]  # a matmul reads it as well


def test_a_program_that_nothing_changes_in():
    plan = plan_of(lambda x: jnp.exp(x) + 1.0, W)
    assert not plan.touched
    assert not any(s.touched for s in plan.steps)
    assert plan.parts == (0, 1)


def test_a_body_is_planned_for_the_formats_of_its_operands():
    plan = plan_of(lambda x: jax.jit(jnp.tanh)(x @ x) @ x, W)
    (body,) = step(plan, "jit").bodies
    assert [value.format.name for value in (*body.ins, *body.outs)] == ["bfloat16", "bfloat16"]


def test_a_carry_keeps_its_format():
    plan = plan_of(lambda x: lax.scan(lambda c, _: (c @ c, c), x, length=2), W)
    assert (read_in(step(plan, "scan")), held_in(step(plan, "scan"))) == (["float32"], ["float32", "float32"])


def test_passes_run_in_order_over_bodies_and_then_around():
    seen = []

    def first(plan):
        seen.append(("first", len(plan.eqns)))
        return plan

    def second(plan):
        seen.append(("second", len(plan.eqns)))
        return plan

    plan_of(lambda x: jax.jit(lambda x: jnp.tanh(x) + 1.0)(x @ x), W, passes=(first, second))
    assert seen == [("first", 2), ("second", 2), ("first", 2), ("second", 2)]


def test_passes_do_not_run_where_nothing_is_low():
    def refuse(plan):
        raise AssertionError

    plan_of(lambda x: x @ x, W, passes=(refuse,), compute_dtype=jnp.float32)


def test_regions_run_where_their_last_part_ran():
    class Region(NamedTuple):
        parts: tuple

    plan = plan_of(lambda x: jnp.exp(jnp.tanh(x @ x)) + 1.0, W)
    assert plan.with_regions([Region((0, 2))]).parts == (1, Region((0, 2)), 3)
    assert plan.with_regions([]) is plan
    with raises(ValueError, r"regions of the parts \['1'\], which this plan does not have", "expected", "map_steps"):
        plan.with_regions([Region((1,))]).with_regions([Region((1, 2))])

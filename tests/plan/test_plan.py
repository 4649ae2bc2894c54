"""Planning: what it costs."""

import jax
import jax.numpy as jnp
from helpers import W

from jaxamp._plan.classify import Judge
from jaxamp._plan.plan import Planner
from jaxamp._plan.sensitivity import FREE, Value
from jaxamp._transform.amp import check_options


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
    jaxpr = jax.make_jaxpr(fn)(W)
    Counting(Judge(options.lookup, options.compute_dtype)).plan(jaxpr, [Value(FREE, W.dtype)], [True], ())
    assert len(reads) < 100

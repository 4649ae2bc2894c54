"""Planning: what it costs."""

import jax
import jax.numpy as jnp
from helpers import W

from jaxamp._formats import Formats
from jaxamp._plan.classify import Classifier
from jaxamp._plan.plan import Setting
from jaxamp._plan.planner import Planner
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
    planner.plan(jaxpr, [Value(FREE, formats.of(W.dtype))], [True], ())
    assert len(reads) < 100

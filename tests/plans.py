"""Plans made without running anything, and what tests ask of them."""

import jax
import jax.numpy as jnp

from jaxamp._compat import open_jaxpr
from jaxamp._formats import Formats
from jaxamp._plan.classify import Classifier
from jaxamp._plan.plan import Setting
from jaxamp._plan.planner import Planner, Want
from jaxamp._plan.sensitivity import Value, sensitivity_of_argument
from jaxamp._transform.options import check_options


def planner_of(*passes, compute_dtype=jnp.bfloat16, policy="default", keep="auto"):
    """A planner that runs these passes and no others."""
    options = check_options(compute_dtype, policy)
    formats = Formats(options.compute_dtype)
    return Planner(Classifier(options.lookup, formats), Setting(formats, keep), passes)


def plan_of(fn, *args, passes=(), **options):
    """The plan of a function, whose results are all returned; without passes, unless some are given."""
    planner, jaxpr = planner_of(*passes, **options), jax.make_jaxpr(fn)(*args)
    of_aval = planner.formats.of_aval
    ins = [Value(sensitivity_of_argument(v.aval), of_aval(v.aval)) for v in open_jaxpr(jaxpr).invars]
    results = [True] * len(open_jaxpr(jaxpr).outvars)
    return planner.plan(jaxpr, ins, [Want.LAST] * len(results), (), returned=results)


def names(plan):
    return [eqn.primitive.name for eqn in plan.eqns]


def step(plan, name, nth=0):
    """The n-th step of a primitive."""
    found = [s for eqn, s in zip(plan.eqns, plan.steps, strict=True) if eqn.primitive.name == name]
    return found[nth]


def modes(plan):
    return {eqn.primitive.name: s.mode for eqn, s in zip(plan.eqns, plan.steps, strict=True)}


def read_in(step):
    """The formats that a step reads its operands in, by name."""
    return [None if f is None else f.name for f in step.reads]


def held_in(step):
    """The formats that a step's results are held in, by name."""
    return [None if value.format is None else value.format.name for value in step.outs]

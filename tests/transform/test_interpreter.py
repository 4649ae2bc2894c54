"""What survives the rewriting (names, lines, contexts, effects, shardings, parameters of a `jit`), and regions."""

import inspect
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import AMP, LOW, W, equations, matmuls
from jax import lax
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata
from plans import plan_of, planner_of

from jaxamp._plan.classify import Classifier
from jaxamp._plan.planner import Planner
from jaxamp._transform.interpreter import Interpreter


def test_name_stacks_survive_and_casts_carry_them():
    def fn(x):
        with jax.named_scope("block"):
            return jax.jit(lambda x: x @ x)(x)

    jaxpr = jax.make_jaxpr(AMP(fn))(W)
    (call,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    assert str(call.source_info.name_stack) == "block"
    text = jax.jit(AMP(fn)).lower(W).as_text(debug_info=True)
    assert "block" in text


def test_source_lines_survive():
    def fn(x):
        return x @ x  # the line

    line = inspect.getsourcelines(fn)[1] + 1
    frames = jax.make_jaxpr(AMP(fn))(W).eqns[0].source_info.traceback.frames
    assert any(f.file_name == __file__ and f.line_num == line for f in frames)


def test_equation_contexts_survive():
    def fn(x):
        with set_xla_metadata(key="value"):
            return x @ x

    assert 'key = "value"' in jax.jit(AMP(fn)).lower(W).as_text()


def test_effects_happen_once_and_in_order(capfd):
    seen = []

    def fn(x):
        def body(c, i):
            io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
            return c @ x, None

        return lax.scan(body, x, jnp.arange(4))[0]

    for run in (AMP(fn), jax.jit(AMP(fn))):
        seen.clear()
        jax.block_until_ready(run(W))
        jax.effects_barrier()
        assert seen == [0, 1, 2, 3]
    jax.block_until_ready(AMP(lambda x: (jax.debug.print("sum {}", (x @ x).sum()), x)[1])(jnp.eye(2)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 2.0\n"


def test_shardings_in_types_survive():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 4)), jax.P("d"))
        out = jax.jit(AMP(lambda x, w: jnp.tanh(x @ w) @ w))(x, W)
        assert out.sharding.spec == jax.P("d", None)
        assert matmuls(AMP(lambda x, w: x @ w), x, W) == [LOW]


def test_jit_parameters_survive():
    inner = jax.jit(lambda x: x @ x, donate_argnums=0, keep_unused=True)
    (eqn,) = [e for e in jax.make_jaxpr(AMP(lambda x: inner(x)))(W).eqns if e.primitive.name == "jit"]
    assert eqn.params["donated_invars"] == (True,)
    assert eqn.params["keep_unused"]


def test_a_jitted_function_called_twice_is_rewritten_once():
    layer = jax.jit(lambda x: jnp.tanh(x @ x))
    jaxpr = jax.make_jaxpr(AMP(lambda x: layer(layer(layer(x @ x))) @ x))(W)
    calls = [e for e in equations(jaxpr) if e.primitive.name == "jit" and e.params["name"] == "<lambda>"]
    assert len(calls) == 3
    assert len({id(e.params["jaxpr"]) for e in calls}) == 1


# -- regions


class Watched(NamedTuple):
    """A region that runs its parts, and says so."""

    parts: tuple
    log: list

    def with_parts(self, parts):
        return self._replace(parts=parts)

    def run(self, runner, plan, env):
        self.log.append(self.parts)
        runner.run_parts(plan, self.parts, env)


def run(plan, planner, *operands):
    return Interpreter(planner).evaluate(plan, operands)


def planned(fn, *args):
    planner = planner_of()
    return plan_of(fn, *args), planner


def test_a_region_runs_in_place_of_its_parts():
    plan, planner = planned(lambda x: jnp.exp(jnp.tanh(x @ x)) + 1.0, W)
    log = []
    with_region = plan.with_regions([Watched((1, 2), log)])
    assert [type(part) for part in with_region.parts] == [int, Watched, int]
    plain, again = (jax.make_jaxpr(lambda x, p=p: run(p, planner, x))(W) for p in (plan, with_region))
    assert str(plain) == str(again)
    assert log == [(1, 2)]


def test_regions_inside_of_regions():
    plan, planner = planned(lambda x: jnp.exp(jnp.tanh(x @ x)) + 1.0, W)
    log = []
    inner = plan.with_regions([Watched((1,), log)])
    outer = inner.with_regions([Watched(tuple(inner.parts[1:3]), log)])
    jax.make_jaxpr(lambda x: run(outer, planner, x))(W)
    assert len(log) == 2


def test_a_region_may_do_what_it_likes():
    class Zero(NamedTuple):
        parts: tuple

        def run(self, runner, plan, env):
            (i,) = self.parts
            with runner.at(plan, i):
                for var, value in plan.values_of(i):
                    env.write(var, jnp.zeros(var.aval.shape, value.dtype), value)

    plan, planner = planned(lambda x: jnp.tanh(x @ x) @ x, W)
    (out,) = run(plan.with_regions([Zero((1,))]), planner, W)
    assert not np.any(np.asarray(out, np.float32))


def test_one_cast_is_made_per_value_and_dtype():
    plan, planner = planned(lambda x: (lambda y: jnp.exp(y) + jnp.sin(y) + jnp.cos(y) + y @ x)(x @ x), W)
    jaxpr = jax.make_jaxpr(lambda x: run(plan, planner, x))(W)
    widened = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type"]
    assert len({(eqn.invars[0], eqn.params["new_dtype"]) for eqn in widened}) == len(widened)


def test_equations_of_a_kind_are_decided_on_and_traced_once(monkeypatch):
    asked = []
    for owner, name in ((Classifier, "_decide"), (Planner, "_step"), (Interpreter, "_operate")):
        kept = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, n=name, k=kept: (asked.append(n), k(*args))[1])

    def counts(layers):
        def fn(x, w):
            for _ in range(layers):
                x = jnp.tanh(x @ w) * 1.5
                x = jnp.where(x > 0, x, 0.1 * x)
            return x

        asked.clear()
        jax.make_jaxpr(AMP(fn))(W, W)
        return Counter(asked)

    assert set(counts(4)) == {"_decide", "_step", "_operate"}
    assert counts(4) == counts(12)

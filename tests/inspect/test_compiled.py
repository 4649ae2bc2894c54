"""The matmuls of a compiled program, read off its text."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from helpers import raises
from jax import lax
from reports import HLO

from jaxamp import amp_report, compiled_matmuls

X, W = jnp.ones((16, 8)), jnp.ones((8, 8))


def test_the_matmuls_of_a_compiled_program():
    assert compiled_matmuls(HLO) == [
        ("dot", ("bfloat16", "bfloat16"), "block"),
        ("dot", ("float32", "float32"), "head/mlp"),
        ("dot", ("bfloat16", "bfloat16"), "block/attention"),
        ("__cublas$gemm", ("bfloat16", "bfloat16"), "block"),
    ]


@pytest.mark.parametrize("backward", [False, True])
def test_scopes_of_a_compiled_program_are_those_of_the_report(backward):
    def layer(*names):
        def apply(w, x):
            with contextlib.ExitStack() as stack:
                for name in names:
                    stack.enter_context(jax.named_scope(name))
                return jnp.tanh(x @ w)

        return apply

    def loss(w, x):
        for name in ("body", "cond", "while", "f(x)", "a/b"):
            x = layer(name)(w, x)
        with jax.named_scope("cond"):
            x = lax.cond(x[0, 0] > 0, layer("branch"), layer("branch_1_fun"), w, x)
        with jax.named_scope("loop"):
            x = lax.scan(lambda c, _: (layer("while", "inside")(w, c), None), x, None, length=3)[0]
        with jax.named_scope("outer"), jax.named_scope("again"):
            x = jax.checkpoint(lambda w, x: jnp.tanh(layer("inner")(w, x) @ w))(w, x)
        with jax.named_scope("mapped"):
            x = jax.vmap(lambda row: layer("row")(w, row))(x)
        return jnp.sum(jax.jit(layer("jitted"))(w, x))

    report = amp_report(loss, compute_dtype=jnp.float32, backward=backward)(W, X)
    compiled = jax.jit(jax.value_and_grad(loss) if backward else loss).lower(W, X).compile()
    assert {row.scope for row in compiled_matmuls(compiled)} == {row.scope for row in report.matmuls}


def test_what_is_not_compiled_is_refused():
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4)))
    for given, name in ((lowered, "Lowered"), (lowered.as_text(), "text"), ("x = f(y)\n", "text"), (3, "int")):
        with raises(TypeError, f"compiled_matmuls got {name} that is not a compiled program; expected", "Write"):
            compiled_matmuls(given)

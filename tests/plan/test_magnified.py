"""What decompositions and solves read comes out in float32, and so does what flows back."""

import jax
import jax.numpy as jnp
import pytest
from helpers import equations, in_float64, near, normal
from jax import lax
from jax.scipy.linalg import cho_solve

import jaxamp

Z, B = normal(0, 24, 6), normal(1, 24)
DTYPES = {"bfloat16": 1e-2, "float16": 1e-3}  # and the errors of gradients


def gram(z, ridge):
    f = jnp.tanh(z)
    return f @ f.T + ridge * jnp.eye(len(z), dtype=z.dtype)


def cholesky(z, b):
    c = jnp.linalg.cholesky(gram(z, 1e-2))
    return 0.5 * b @ cho_solve((c, True), b) + jnp.log(jnp.diag(c)).sum()


def inverse(z, b):
    return b @ jnp.linalg.inv(gram(z, 1e-1)) @ b


def determinant(z, b):
    return jnp.linalg.slogdet(gram(z, 1e-1))[1]


def least_squares(z, b):
    f = jnp.tanh(z)
    return jnp.sum(jnp.linalg.solve(f.T @ f / 24 + 0.1 * jnp.eye(6, dtype=z.dtype), f.T @ b) ** 2)


def eigenvalues(z, b):
    return jnp.sum(jnp.log(jnp.linalg.eigvalsh(z.T @ z + 0.1 * jnp.eye(6, dtype=z.dtype))))


def singular_values(z, b):
    return jnp.sum(jnp.sqrt(jnp.linalg.svd(z.T @ jnp.tanh(z), compute_uv=False)))


def orthogonal(z, b):
    q, r = jnp.linalg.qr(jnp.tanh(z) @ jnp.eye(6, dtype=z.dtype))
    return jnp.sum(jnp.log(jnp.abs(jnp.diag(r)))) + jnp.sum((b @ q) ** 2)


def of_a_kernel(z, b):
    """Element-wise work, among it an exponential, between the matmul and the decomposition."""
    squares = jnp.sum(z**2, 1)
    k = jnp.exp(-(squares[:, None] + squares[None] - 2 * z @ z.T) / 8) + 0.1 * jnp.eye(24, dtype=z.dtype)
    return b @ cho_solve((jnp.linalg.cholesky(k), True), b)


def in_other_functions(z, b):
    h = jax.nn.gelu(z @ jnp.ones((6, 8), z.dtype) / 6)
    k = jax.jit(lambda h: h @ h.T)(h) + 0.1 * jnp.eye(24, dtype=z.dtype)
    return b @ jax.checkpoint(jnp.linalg.solve)(k, b)


def in_a_loop(z, b):
    """The matmuls of one round feed the solve of the next."""
    f, eye = jnp.tanh(z[:6]), jnp.eye(6, dtype=z.dtype)

    def round_(p, row):
        s = f @ p @ f.T / 6 + eye
        return p - 0.5 * p @ jnp.linalg.solve(s, p) / 6 + eye * jnp.mean(row) ** 2, jnp.trace(s)

    p, traces = lax.scan(round_, eye, z[:4])
    return jnp.sum(p) + jnp.sum(traces)


@jax.custom_jvp
def square_by_jvp(f):
    return f @ f.T


@square_by_jvp.defjvp
def _square_jvp(primals, tangents):
    (f,), (t,) = primals, tangents
    half = t @ f.T
    return f @ f.T, half + half.T


@jax.custom_vjp
def square_by_vjp(f):
    return f @ f.T


square_by_vjp.defvjp(lambda f: (f @ f.T, f), lambda f, ct: ((ct + ct.T) @ f,))


def under_rules_of_the_user(z, b):
    eye = 0.1 * jnp.eye(24, dtype=z.dtype)
    return jnp.linalg.slogdet(square_by_jvp(jnp.tanh(z)) + eye)[1] + b @ jnp.linalg.solve(square_by_vjp(z) + eye, b)


CASES = [
    cholesky,
    inverse,
    determinant,
    least_squares,
    eigenvalues,
    singular_values,
    orthogonal,
    of_a_kernel,
    in_other_functions,
    in_a_loop,
    under_rules_of_the_user,
]


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_through_decompositions_and_solves(fn, dtype):
    found = jax.grad(jaxamp.amp(fn, compute_dtype=dtype))(Z, B)
    assert near(found, in_float64(jax.grad(fn), Z, B), DTYPES[dtype])


def dtypes_of_matmuls(fn):
    jaxpr = jax.make_jaxpr(fn)(Z, B)
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in ("dot_general", "mixed_dot_general")]
    return [(eqn.primitive.name, eqn.outvars[0].aval.dtype.name) for eqn in found if eqn.outvars[0].aval.ndim == 2]


def test_the_matmul_itself_is_low_and_its_derivative_is_not():
    amp = jaxamp.amp(cholesky, compute_dtype=jnp.bfloat16)
    assert dtypes_of_matmuls(amp) == [("mixed_dot_general", "float32")]
    jaxpr = jax.make_jaxpr(amp)(Z, B)
    (eqn,) = (e for e in equations(jaxpr) if e.primitive.name == "mixed_dot_general" and e.outvars[0].aval.ndim == 2)
    assert (eqn.params["compute_dtype"], eqn.params["mixing"].exact_tangents) == (jnp.bfloat16, True)
    backward = [e for e in equations(jax.make_jaxpr(jax.grad(amp))(Z, B)) if e.primitive.name == "dot_general"]
    wide = [e for e in backward if e.outvars[0].aval.shape in ((24, 6), (6, 24))]
    assert [[v.aval.dtype.name for v in e.invars] for e in wide] == [["float32", "float32"]] * 2
    assert {e.params["precision"] for e in wide} == {(lax.Precision.HIGHEST, lax.Precision.HIGHEST)}


def test_a_matmul_behind_another_matmul_is_plain():
    fn = lambda z, b: jnp.linalg.slogdet((jnp.tanh(z @ jnp.ones((6, 6))) @ z.T)[:6, :6] + jnp.eye(6))[1]
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(Z, B)
    found = [eqn for eqn in equations(jaxpr) if "dot_general" in eqn.primitive.name]
    assert [eqn.outvars[0].aval.dtype.name for eqn in found] == ["bfloat16", "float32"]


def test_the_reason_in_a_report():
    report = jaxamp.amp_report(cholesky, compute_dtype=jnp.bfloat16)(Z, B)
    reasons = [row.reason for row in report.rows if row.kind == "matmul" and row.phase == "forward"]
    assert "policy table; a decomposition or a solve reads it" in reasons


def test_forward_mode_and_vmap():
    amp = jaxamp.amp(cholesky, compute_dtype=jnp.float16)
    tangent = jax.jvp(lambda z: amp(z, B), (Z,), (jnp.ones_like(Z),))[1]
    assert near(
        tangent, in_float64(lambda z, b: jax.jvp(lambda z: cholesky(z, b), (z,), (jnp.ones_like(z),))[1], Z, B), 2e-3
    )
    both = jnp.stack([Z, Z[::-1]])
    found = jax.grad(lambda z: jnp.sum(jax.vmap(amp, (0, None))(z, B)))(both)
    expected = in_float64(jax.grad(lambda z, b: jnp.sum(jax.vmap(cholesky, (0, None))(z, b))), both, B)
    assert near(found, expected, 1e-3)

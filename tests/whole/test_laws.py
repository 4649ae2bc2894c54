"""Every program of the table under every law of `amp`: dtypes are read from jaxprs, values measured against float64."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MATMULS, Program, count, equations, jaxpr_of, matmul_dtypes, multiplied
from programs_core import PROGRAMS as CORE
from programs_libraries import PROGRAMS as LIBRARIES

import jaxamp
from jaxamp._inspect.pullback import pullback_of
from jaxamp._plan.higher_order import describe
from jaxamp._traits import shown_name

TABLE = {program.name: program for program in (*CORE, *LIBRARIES)}
LAWS = ("types", "empty_policy", "matmuls", "values", "jit", "vmap", "twice", "second_call")
DERIVATIVES = ("grad", "amp_of_grad", "backward_matmuls", "jvp", "hessian")
DTYPES = (jnp.bfloat16, jnp.float16)
# float16 keeps three more bits than bfloat16, for which the tolerances of the table are stated.
SHARPER = {jnp.bfloat16: 1.0, jnp.float16: 0.25}
# A derivative rounds twice: forwards and backwards.
DERIVATIVE = 2.0
# Where the models of libraries take long, and tell little that the programs in plain JAX do not.
SLOW = ("vmap", "amp_of_grad", "jvp")
HESSIANS = ("gelu", "softmax", "layer_norm", "rnn_by_scan", "custom_jvp_with_matmuls")


def over(law: str, *dtypes: Any, values: bool = False) -> Any:
    """Parametrise a test by the programs that a law holds for, and by compute dtypes.

    `values`: the law compares numbers with the oracle's.
    """
    libraries = {program.name for program in LIBRARIES}

    def marks(name: str, dtype: Any) -> Any:
        if name in libraries:
            yield pytest.mark.promotes
        of_library = name in libraries and ((values and law in SLOW) or dtype is jnp.float16)
        if of_library or (law == "amp_of_grad" and dtype is jnp.float16):
            yield pytest.mark.slow

    cases = [
        pytest.param(program, dtype, id=f"{name}-{dtype.__name__}", marks=list(marks(name, dtype)))
        for name, program in TABLE.items()
        for dtype in dtypes
        if not program.without.keys() & {law, dtype.__name__, *(["oracle"] if values else [])}
    ]
    return pytest.mark.parametrize(("program", "dtype"), cases)


# -- a program as a function of its float arguments


def is_float(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def floats_of(program: Program) -> list[Any]:
    return [x for x in jax.tree.leaves(program.args()) if is_float(x)]


def of_floats(program: Program, fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`fn` (the program's own by default) with everything but the float arguments bound."""
    leaves, tree = jax.tree.flatten(program.args())

    def flat(*floats: Any) -> Any:
        it = iter(floats)
        return (fn or program.fn)(*jax.tree.unflatten(tree, [next(it) if is_float(x) else x for x in leaves]))

    return flat


def of_arrays(program: Program, fn: Callable[..., Any] | None = None) -> tuple[Callable[..., Any], list[Any]]:
    """`fn` with the arguments bound that are not arrays, as a function whose arrays are traced, and the arrays."""
    leaves, tree = jax.tree.flatten(program.args())
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

    def flat(*arrays: Any) -> Any:
        it = iter(arrays)
        args = jax.tree.unflatten(tree, [next(it) if a else x for x, a in zip(leaves, is_array, strict=True)])
        return [x for x in jax.tree.leaves((fn or program.fn)(*args)) if isinstance(x, jax.Array | np.ndarray)]

    return flat, [x for x, a in zip(leaves, is_array, strict=True) if a]


def jaxpr_of_arrays(program: Program, fn: Callable[..., Any] | None = None) -> Any:
    flat, arrays = of_arrays(program, fn)
    return jaxpr_of(flat, *arrays)


def scalar_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """One number of all that `fn` returns. The weights differ, for the sum of a softmax has no gradient."""

    def scalar(*args: Any) -> Any:
        total = jnp.zeros(())
        for x in map(jnp.asarray, jax.tree.leaves(fn(*args))):
            parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,) if jnp.issubdtype(x.dtype, jnp.floating) else ()
            for part in parts:
                weights = 0.5 + 0.25 * (np.arange(part.size).reshape(part.shape) % 5)
                total += jnp.sum(part * weights.astype(part.dtype)).astype(total.dtype)
        return total

    return scalar


def gradient_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *floats: jax.grad(scalar_of(fn), argnums=tuple(range(len(floats))))(*floats)


def tangent_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The tangents of the results that have one, along a fixed direction."""

    def tangents(*floats: Any) -> list[Any]:
        along = tuple(jnp.asarray(1 - 0.25 * (np.arange(x.size).reshape(x.shape) % 7), x.dtype) for x in floats)
        return [t for t in jax.tree.leaves(jax.jvp(fn, floats, along)[1]) if t.dtype != jax.dtypes.float0]

    return tangents


def hessian_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.hessian(scalar_of(fn))


def amp(fn: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    return jaxamp.amp(fn, compute_dtype=dtype)


# -- the oracle


def numbers(tree: Any) -> list[np.ndarray]:
    """The results that can be compared; keys can not."""
    leaves = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)]
    return [np.asarray(x) for x in leaves]


@functools.cache
def compiled(name: str, derivative: Callable[..., Any] | None) -> Callable[..., Any]:
    with jax.enable_x64(False):  # whoever asks first: the integers that are bound stay 32 bits wide
        fn = of_floats(TABLE[name])
    return jax.jit(derivative(fn) if derivative else fn)


@functools.cache
def oracle(name: str, derivative: Callable[..., Any] | None = None, factor: float = 1.0) -> list[np.ndarray]:
    """The program, or a derivative of it, in float64; its float arguments times `factor`."""
    floats = [np.asarray(x, np.float64) * factor for x in floats_of(TABLE[name])]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # a library's float32 constants
        return numbers(compiled(name, derivative)(*map(jax.device_put, floats)))


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest magnitude."""
    if not want.size:
        return 0.0
    if not np.issubdtype(want.dtype, np.inexact):
        return float(np.any(got != want))
    kind = np.complex128 if np.iscomplexobj(want) else np.float64
    difference = float(np.max(np.abs(got.astype(kind) - want)))
    return difference / float(np.max(np.abs(want))) if difference else 0.0


def assert_near(got: Any, want: Sequence[np.ndarray], tolerance: float) -> None:
    got = numbers(got)
    assert [x.shape for x in got] == [x.shape for x in want]
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert np.all(np.isfinite(y)), f"the oracle's result {i} is not finite"
        assert distance(x, y) <= tolerance, f"result {i}: {distance(x, y):.2g} from float64, of {tolerance:.2g}"


def tolerance(program: Program, dtype: Any) -> float:
    return program.rtol * SHARPER[dtype]


# -- reading jaxprs


def skeleton(jaxpr: Any) -> list[Any]:
    """All of a jaxpr that means something: not the names of variables, addresses, or which bodies are one object."""
    numbers: dict[Any, int] = {}

    def atom(v: Any) -> str:
        name = repr(v.val) if isinstance(v, jec.Literal) else f"v{numbers.setdefault(v, len(numbers))}"
        return f"{name}:{v.aval}"

    def params(eqn: Any) -> dict[str, str]:
        # The rules of a custom_vjp function are wrapped again when it is bound again.
        rules = {"fwd_jaxpr_thunk", "bwd", "out_trees", "num_consts"}
        plain = {k: v for k, v in eqn.params.items() if k not in rules and not list(jec.jaxprs_in_params({k: v}))}
        return {k: re.sub(r"0x[0-9a-f]+", "", str(v)) for k, v in plain.items()}

    def body(jaxpr: Any) -> list[Any]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        heads = [[atom(v) for v in (*jaxpr.constvars, *jaxpr.invars)]]
        for eqn in jaxpr.eqns:
            ins = [atom(v) for v in eqn.invars]
            inner = [skeleton(j) for j in jec.jaxprs_in_params(eqn.params)]
            heads.append((eqn.primitive.name, str(eqn.source_info.name_stack), ins, params(eqn), inner))
            heads.append([atom(v) for v in eqn.outvars])
        return [*heads, [atom(v) for v in jaxpr.outvars]]

    return body(jaxpr)


def mixed(jaxpr: Any) -> list[tuple[str, ...]]:
    return [pair for pair in matmul_dtypes(jaxpr) if len(set(pair)) > 1]


def contractions(jaxpr: Any) -> list[tuple[str, ...]]:
    """The dtypes that are multiplied by the matmuls that are not outer products and ask for no precision."""
    return [
        multiplied(eqn)
        for eqn in equations(jaxpr)
        if eqn.primitive.name in MATMULS
        and not (
            eqn.primitive.name.endswith("dot_general")
            and "dimension_numbers" in eqn.params
            and not eqn.params["dimension_numbers"][0][0]
        )
        and eqn.params["precision"] != (jax.lax.Precision.HIGHEST,) * 2
    ]


# Several laws read one trace of a program, and `conftest.py` runs the laws of a program in one process.


@functools.cache
def plain_jaxpr(name: str) -> Any:
    return jaxpr_of_arrays(TABLE[name])


@functools.cache
def jaxpr_under_amp(name: str, dtype: Any) -> Any:
    return jaxpr_of_arrays(TABLE[name], amp(TABLE[name].fn, dtype))


@functools.cache
def gradient_of_amp(name: str, dtype: Any) -> jax.stages.Traced:
    program = TABLE[name]
    return jax.jit(gradient_of(of_floats(program, amp(program.fn, dtype)))).trace(*floats_of(program))


@functools.cache
def amp_of_gradient(name: str, dtype: Any) -> jax.stages.Traced:
    return jax.jit(amp(gradient_of(of_floats(TABLE[name])), dtype)).trace(*floats_of(TABLE[name]))


# -- the laws


@functools.cache
def called_twice(name: str) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """What two calls of a program under amp give, outside of jit, and how often it was traced after each."""
    traced = 0

    def counted(*args: Any) -> Any:
        nonlocal traced
        traced += 1
        return TABLE[name].fn(*args)

    if count("pallas_call", plain_jaxpr(name)):  # Pallas changes JAX's configuration when it first runs
        compiled(name, None)(*floats_of(TABLE[name]))
    fn, results, traces = amp(counted, jnp.bfloat16), [], []
    for _ in range(2):
        results.append(numbers(fn(*TABLE[name].args())))
        traces.append(traced)
    return results[0], results[1], traces


def test_names_are_unique_and_laws_exist():
    assert len(TABLE) == len(CORE) + len(LIBRARIES)
    known = {"oracle", *LAWS, *DERIVATIVES, *(dtype.__name__ for dtype in DTYPES)}
    assert {law for program in TABLE.values() for law in program.without} <= known


def test_the_oracle_tells_a_low_sum_from_a_float32_one():
    x = np.random.default_rng(0).uniform(size=4096)
    low = jax.lax.scan(lambda total, y: (total + y, None), jnp.bfloat16(0), jnp.asarray(x, jnp.bfloat16))[0]
    assert distance(np.asarray(jnp.asarray(x, jnp.float32).sum()), x.sum()) < 1e-4
    assert distance(np.asarray(low), x.sum()) > 0.1


@over("types", jnp.bfloat16)
def test_results_have_the_types_that_fn_gives_them(program, dtype):
    want, got = plain_jaxpr(program.name), jaxpr_under_amp(program.name, dtype)
    assert [(a.shape, a.dtype, a.weak_type) for a in got.out_avals] == [
        (a.shape, a.dtype, a.weak_type) for a in want.out_avals
    ]


@over("empty_policy", jnp.bfloat16)
def test_an_empty_policy_leaves_the_jaxpr_equal(program, dtype):
    empty = jaxamp.amp(program.fn, compute_dtype=dtype, amp_policy={})
    assert skeleton(jaxpr_of_arrays(program, empty)) == skeleton(plain_jaxpr(program.name))


@over("matmuls", *DTYPES)
def test_matmuls_are_low_as_counted(program, dtype):
    found = matmul_dtypes(jaxpr_under_amp(program.name, dtype))
    low = [pair for pair in found if set(pair) == {dtype.__name__}]
    assert (len(low), len(found) - len(low)) == (program.low, program.kept), found
    assert not [pair for pair in found if len(set(pair)) > 1]


@over("values", *DTYPES, values=True)
def test_values_are_near_float64(program, dtype):
    got = called_twice(program.name)[0] if dtype is jnp.bfloat16 else amp(program.fn, dtype)(*program.args())
    assert_near(got, oracle(program.name), tolerance(program, dtype))


@over("jit", jnp.bfloat16)
def test_jit_of_amp_has_the_jaxpr_of_amp(program, dtype):
    fn, arrays = of_arrays(program, amp(program.fn, dtype))
    (call,) = jaxpr_of(jax.jit(fn, keep_unused=True), *arrays).eqns
    assert skeleton(call.params["jaxpr"]) == skeleton(jaxpr_under_amp(program.name, dtype))


@over("vmap", jnp.bfloat16, values=True)
def test_vmap_of_amp_is_near_float64(program, dtype):
    floats = [jax.device_put(np.stack([x, x * x.dtype.type(0.875)])) for x in map(np.asarray, floats_of(program))]
    out = numbers(jax.vmap(of_floats(program, amp(program.fn, dtype)))(*floats))
    for i, factor in enumerate((1.0, 0.875)):
        assert_near([x[i] for x in out], oracle(program.name, None, factor), tolerance(program, dtype))


@over("twice", jnp.bfloat16)
def test_amp_of_amp_has_the_jaxpr_of_amp(program, dtype):
    twice = amp(amp(program.fn, dtype), dtype)
    assert skeleton(jaxpr_of_arrays(program, twice)) == skeleton(jaxpr_under_amp(program.name, dtype))


@over("grad", *DTYPES)
def test_backward_matmuls_of_amp_are_low(program, dtype):
    jaxpr = gradient_of_amp(program.name, dtype).jaxpr
    assert not mixed(jaxpr)
    assert program.kept or "backward_matmuls" in program.without or {*contractions(jaxpr)} <= {(dtype.__name__,) * 2}


@over("amp_of_grad", *DTYPES)
def test_matmuls_of_a_gradient_under_amp_are_low(program, dtype):
    jaxpr = amp_of_gradient(program.name, dtype).jaxpr
    assert not mixed(jaxpr)
    assert program.kept or {*contractions(jaxpr)} <= {(dtype.__name__,) * 2}


def assert_gradients_near(traced: jax.stages.Traced, program: Program, dtype: Any) -> None:
    floats = floats_of(program)
    got = traced.lower().compile()(*floats)
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in floats]
    assert_near(got, oracle(program.name, gradient_of), DERIVATIVE * tolerance(program, dtype))


@over("grad", jnp.bfloat16, values=True)
def test_gradient_of_amp_is_near_float64(program, dtype):
    assert_gradients_near(gradient_of_amp(program.name, dtype), program, dtype)


@over("amp_of_grad", jnp.bfloat16, values=True)
def test_amp_of_a_gradient_is_near_float64(program, dtype):
    assert_gradients_near(amp_of_gradient(program.name, dtype), program, dtype)


@over("jvp", jnp.bfloat16, values=True)
def test_tangent_of_amp_is_near_float64(program, dtype):
    fn = jax.jit(tangent_of(of_floats(program, amp(program.fn, dtype))))
    assert_near(fn(*floats_of(program)), oracle(program.name, tangent_of), DERIVATIVE * tolerance(program, dtype))


@pytest.mark.parametrize("name", HESSIANS)
def test_hessian_of_amp_is_near_float64(name):
    program = TABLE[name]
    fn = jax.jit(hessian_of(of_floats(program, amp(program.fn, jnp.bfloat16))))
    got = fn(*floats_of(program))
    assert_near(got, oracle(name, hessian_of), 2 * DERIVATIVE * program.rtol)


@over("second_call", jnp.bfloat16)
def test_a_second_call_traces_nothing_and_gives_the_same(program, dtype):
    first, second, traces = called_twice(program.name)
    assert traces[0] == traces[1]
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


# -- the report


def run_dtypes(jaxpr: Any) -> Any:
    """Each operation that runs, bodies included, with its dtypes."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        entry = describe(eqn)
        if entry is None:
            operands = tuple(str(getattr(v.aval, "dtype", type(v.aval).__name__)) for v in eqn.invars)
            if eqn.primitive.name.startswith("mixed_"):
                operands = (*multiplied(eqn), *operands[2:])
            results = tuple(str(getattr(v.aval, "dtype", type(v.aval).__name__)) for v in eqn.outvars)
            yield shown_name(eqn.primitive), operands, results
        else:
            for body in entry.bodies:
                yield from run_dtypes(body.jaxpr)


@over("report", jnp.bfloat16)
def test_a_report_has_the_dtypes_of_the_program_that_runs(program, dtype):
    args = program.args()
    report = jaxamp.amp_report(program.fn, compute_dtype=dtype)(*args)
    forward, arrays = jaxpr_under_amp(program.name, dtype), of_arrays(program)[1]

    def rows(phase: str) -> Counter:
        return Counter((row.primitive, *row.run) for row in report.rows if row.phase == phase)

    assert rows("forward") == Counter(run_dtypes(forward))
    if report.kept is not None:
        first = len([x for x in jax.tree.leaves(args[0]) if isinstance(x, jax.Array | np.ndarray)])
        moving = [i for i in range(first) if is_float(arrays[i])]
        assert rows("backward") == Counter(run_dtypes(pullback_of(forward, moving).jaxpr))
    else:
        assert report.notes
    matmuls = [row for row in report.matmuls if row.phase == "forward" and row.primitive in MATMULS]
    assert [row.multiplied for row in matmuls].count(jnp.dtype(dtype).name) == program.low
    assert all(row.reason for row in report.rows)

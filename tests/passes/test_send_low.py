"""Values that are only read rounded are sent rounded; gradients are summed over devices in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded_programs
from helpers import AMP, BF16, F32, MATMULS, both, equations, error, in_float64, normal, raises
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxamp
from jaxamp._primitives.sent_low import sent_low
from jaxamp._traits import traits_of

WITHOUT = functools.partial(AMP, disable_passes=["send_low"])


@functools.cache
def programs():
    return sharded_programs.programs(jax.devices(), 64, 2)


def sends(jaxpr):
    """Primitive, and whether it is low, of what is sent in the forward pass and back."""
    found = [eqn for eqn in equations(jaxpr) if traits_of(eqn.primitive).communicates and eqn.outvars[0].aval.ndim > 1]
    return [(eqn.primitive.name.removeprefix("low_"), "low" in eqn.params) for eqn in found]


def arguments(program):
    weights, batch = program.specs()
    made = [normal(i, *w.shape, scale=w.shape[-1] ** -0.5) for i, w in enumerate(weights)]
    placed = [jax.device_put(x, w.sharding) for x, w in zip(made, weights, strict=True)]
    x = normal(9, *batch.shape)
    return (made, x), (placed, jax.device_put(x, batch.sharding))


OTHERS = (*sharded_programs.RULES, *sharded_programs.AVERAGED, *sharded_programs.SUMMED, *sharded_programs.LEFT)


@both
@pytest.mark.parametrize("name", [*sharded_programs.NAMES, *OTHERS])
def test_gradients_are_those_of_one_device(name, low):
    program = programs()[name]()
    plain, placed = arguments(program)
    with program.context():
        amp = functools.partial(jaxamp.amp, compute_dtype=low)
        found = jax.jit(program.gradient(amp))(*placed)
        exact = in_float64(program.gradient(lambda f: f), *placed)
    for g, e, w in zip(found, exact, plain[0], strict=True):
        assert g.dtype == F32
        assert g.shape == w.shape
        assert error(g, e) < 2e-2


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "tensor parallel"])  # it sums activations
def test_gradients_are_not_rounded_before_the_sum(name):
    program = programs()[name]()
    jaxpr = jax.make_jaxpr(program.gradient(AMP))(*program.specs())
    sums = [eqn for eqn in equations(jaxpr) if traits_of(eqn.primitive).sums_devices and eqn.invars[0].aval.ndim > 1]
    assert {eqn.invars[0].aval.dtype.name for eqn in sums} <= {"float32"}
    assert sums or "constraint" in name or name in sharded_programs.LEFT
    results = [eqn.outvars[0].aval for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS]
    assert {aval.dtype.name for aval in results if aval.shape == (64, 64)} == {"float32"}  # activations have fewer rows


@pytest.mark.parametrize("name", sharded_programs.NAMES)
def test_what_is_read_rounded_is_sent_rounded(name):
    program = programs()[name]()
    with program.context():
        specs = program.specs()
        written = sends(jax.make_jaxpr(program.loss)(*specs))
        found = sends(jax.make_jaxpr(AMP(program.loss))(*specs))
        before = sends(jax.make_jaxpr(WITHOUT(program.loss))(*specs))
    assert written
    assert not any(is_low for _, is_low in before)
    assert {is_low for _, is_low in found} == {name != "wide reader"}
    assert len(found) <= len(written)


def test_a_weight_that_is_gathered_twice_is_sent_once():
    program = programs()["used twice"]()
    assert len(sends(jax.make_jaxpr(program.loss)(*program.specs()))) == 2
    assert sends(jax.make_jaxpr(AMP(program.loss))(*program.specs())) == [("sharding_constraint", True)]


def everywhere(w):
    return lax.with_sharding_constraint(w, NamedSharding(Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec()))


def returned(w, x):
    w = everywhere(w)
    return x @ w, w


def also_read_by_an_exponential(w, x):
    w = everywhere(w)
    return x @ w + jnp.exp(w[0])


def carried_by_a_loop(w, x):
    return lax.scan(lambda c, _: (c.T, x @ c), everywhere(w), None, length=2)[1]


def sorted_first(w, x):
    """Rounding might make entries equal, and their order is then another."""
    return x @ jnp.sort(everywhere(w))


W, X = normal(0, 16, 16), normal(1, 8, 16)


@pytest.mark.parametrize("fn", [returned, also_read_by_an_exponential, carried_by_a_loop, sorted_first])
def test_what_something_else_reads_is_sent_as_it_is(fn):
    jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
    assert not any(is_low for _, is_low in sends(jaxpr))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(AMP(fn))(W, X), jax.jit(WITHOUT(fn))(W, X))


WIRED = (
    *("shard_map", "scan and remat in a shard_map", "rules", "rules that both gather"),
    *sharded_programs.AVERAGED,
    *sharded_programs.SUMMED,
)
REDUCED = {
    reduce: functools.partial(
        AMP,
        amp_policy={**jaxamp.load_policy("default"), jaxamp.COMMUNICATION: jaxamp.Communication(reduce=reduce)},
    )
    for reduce in ("float32", "compute", "wire")
}


@pytest.mark.parametrize(
    ("name", "reduce"),
    [(name, "compute") for name in (*sharded_programs.NAMES, *OTHERS)] + [(name, "wire") for name in WIRED],
)
def test_gradients_that_are_sent_low_are_near(name, reduce):
    program = programs()[name]()
    _, placed = arguments(program)
    with program.context():
        found = jax.jit(program.gradient(REDUCED[reduce]))(*placed)
        exact = in_float64(program.gradient(lambda f: f), *placed)
    for g, e in zip(found, exact, strict=True):
        assert g.dtype == F32
        assert error(g, e) < 2e-2


def test_the_sum_over_devices_is_rounded_once_or_not_at_all():
    """Of gradients that are 1 on one device and 2**-9 on the others, bfloat16 adds nothing to the first."""
    mesh, split = Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec("d")
    x = jnp.repeat(jnp.asarray([1.0, *[2.0**-9] * 7], jnp.float32)[:, None], 8, axis=1)  # a row for each device

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(split, split), out_specs=PartitionSpec())
    def total(w, x):
        return lax.psum(jnp.sum(x @ lax.all_gather(w, "d", tiled=True)), "d")

    gradient = lambda reduce: np.asarray(jax.jit(jax.grad(REDUCED[reduce](total)))(jnp.ones((8, 4)), x))
    exact = 1.0 + 7 * 2.0**-9
    assert (gradient("float32") == exact).all()
    assert (gradient("wire") == exact).all()
    assert (np.abs(gradient("compute") - exact) > 2.0**-10).all()


def test_a_sum_that_the_user_writes_is_rounded_before_and_after():
    """The same sum, on all devices and in parts, of matmuls' results."""
    mesh, split = Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec("d")
    x = jnp.repeat(jnp.asarray([1.0, *[2.0**-9] * 7], jnp.float32)[:, None], 8, axis=0)  # eight rows for each device
    exact = np.float32(1.0 + 7 * 2.0**-9)
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), split))

    def result(reduce, summed, out_specs):
        fn = REDUCED[reduce](over(lambda w, x: summed(x @ w), out_specs=out_specs))
        return np.asarray(jax.jit(fn)(jnp.ones((1, 3)), x))

    whole = functools.partial(result, summed=lambda y: lax.psum(y, "d"), out_specs=PartitionSpec())
    parts = functools.partial(result, summed=lambda y: lax.psum_scatter(y, "d", tiled=True), out_specs=split)
    assert (whole("float32") == exact).all()
    assert (whole("wire") == rounded(exact)).all()
    for reduce in ("float32", "wire"):
        assert (parts(reduce) == exact).all()
    assert parts("wire").dtype == whole("wire").dtype == F32


@pytest.mark.parametrize("reduce", ["compute", "wire"])
@pytest.mark.parametrize("name", [*sharded_programs.AVERAGED, *sharded_programs.SUMMED])
def test_in_float16_the_word_goes_before_the_rule_for_sums(name, reduce):
    program = programs()[name]()
    jaxpr = jax.make_jaxpr(program.gradient(lambda f: REDUCED[reduce](f, compute_dtype=jnp.float16)))(*program.specs())
    sums = [eqn for eqn in equations(jaxpr) if traits_of(eqn.primitive).sums_devices and eqn.invars[0].aval.ndim > 1]
    assert sums
    assert {eqn.invars[0].aval.dtype.name for eqn in sums} == {"float16"}
    assert {eqn.primitive.name.endswith("_wide") for eqn in sums} == {reduce == "wire"}


def test_what_was_not_made_by_low_operations_is_summed_as_it_is():
    mesh, split = Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec("d")
    counts = functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    x = jnp.arange(64.0).reshape(8, 8) * 1.001
    for reduce in ("compute", "wire"):
        found = jax.make_jaxpr(REDUCED[reduce](counts(lambda x: lax.psum(jnp.exp(x), "d"))))(x)
        (sum_,) = (eqn for eqn in equations(found) if traits_of(eqn.primitive).sums_devices)
        assert sum_.invars[0].aval.dtype == F32


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", ["d", ("d", "t")])
def test_wide_sums_of_any_size_over_one_axis_or_two(axes, check_vma):
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("d", "t"))
    specs = PartitionSpec(), PartitionSpec(axes)
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
    w, x = normal(3, 5, 7), normal(4, 24, 5)
    summed = over(lambda w, x: lax.psum(x @ w, axes), out_specs=PartitionSpec())
    loss = lambda transform: lambda w, x: jnp.sum(transform(summed)(w, x) ** 2)
    found = jax.jit(jax.value_and_grad(loss(REDUCED["wire"])))(w, x)
    exact = in_float64(jax.value_and_grad(loss(lambda f: f)), w, x)
    assert error(found[0], exact[0]) < 2e-2
    assert error(found[1], exact[1]) < 2e-2
    many = jax.vmap(REDUCED["wire"](summed), (0, None))(jnp.stack([w, 2.0 * w]), x)
    assert error(many[1], in_float64(summed, 2.0 * w, x)) < 2e-2


@pytest.mark.parametrize("groups", [[[0, 3, 5, 6], [1, 2, 4, 7]], [[0, 1], [2, 3, 4, 5, 6, 7]]])
def test_groups_of_devices_sum_for_themselves(groups):
    mesh, split = Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec("d")
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=split)
    fn = over(lambda w, x: lax.psum(x @ w, "d", axis_index_groups=groups), check_vma=False)
    w, x = normal(3, 5, 7), normal(4, 24, 5)
    jaxpr = jax.make_jaxpr(REDUCED["wire"](fn))(w, x)
    is_wide = any(eqn.primitive.name == "psum_wide" for eqn in equations(jaxpr))
    assert is_wide == (len(groups[0]) == len(groups[1]))
    found = jax.jit(REDUCED["wire"](fn))(w, x)
    exact = np.zeros((8, 3, 7))
    parts = np.asarray(x, np.float64).reshape(8, 3, 5) @ np.asarray(w, np.float64)
    for group in groups:
        exact[group] = parts[group].sum(0)
    assert error(found, exact.reshape(24, 7)) < 2e-2


@pytest.mark.parametrize("reduce", ["compute", "wire"])
def test_without_vma_jax_sums_gradients_of_what_all_devices_have(reduce):
    mesh, split = Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec("d")
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=PartitionSpec())
    loss = over(lambda w, x: lax.pmean(jnp.mean(jnp.tanh(x @ w)), "d"), check_vma=False)
    jaxpr = jax.make_jaxpr(jax.grad(REDUCED[reduce](loss)))(normal(3, 5, 7), normal(4, 24, 5))
    (sum_,) = (eqn for eqn in equations(jaxpr) if traits_of(eqn.primitive).sums_devices and eqn.invars[0].aval.ndim)
    assert sum_.invars[0].aval.dtype == F32


def test_a_sum_that_xla_makes_can_not_be_sent_low_and_made_in_float32():
    program = programs()["constraint"]()
    with raises(ValueError, "reduce='wire' for sharding_constraint", "expected a shard_map", "Write reduce="):
        jax.make_jaxpr(REDUCED["wire"](program.loss))(*program.specs())


def test_float32_changes_nothing():
    same = jaxamp.amp(lambda w, x: x @ everywhere(w), compute_dtype=F32)
    assert sends(jax.make_jaxpr(same)(W, X)) == [("sharding_constraint", False)]


# -- the primitive


def rounded(x):
    return np.asarray(x.astype(BF16).astype(F32))


PARAMS = dict(jax.make_jaxpr(everywhere)(W).eqns[0].params)
BASE = jax.make_jaxpr(everywhere)(W).eqns[0].primitive
SENT = functools.partial(sent_low(BASE).bind, low=np.dtype(BF16), reduce="float32", **PARAMS)


def test_its_value_is_rounded_and_its_derivative_is_not():
    out, pull = jax.vjp(jax.jit(SENT), W)
    np.testing.assert_array_equal(out, rounded(W))
    np.testing.assert_array_equal(pull(W * 1.001)[0], W * 1.001)
    out, tangent = jax.jvp(SENT, (W,), (W * 1.001,))
    np.testing.assert_array_equal(out, rounded(W))
    np.testing.assert_array_equal(tangent, W * 1.001)


def test_the_low_result_is_what_is_kept():
    _, pull = jax.vjp(lambda w: jnp.sum(jnp.sin(SENT(w))), W)
    jaxpr = jax.make_jaxpr(lambda w: jax.vjp(SENT, w)[0])(W)
    (sent,) = (eqn for eqn in equations(jaxpr) if "low" in eqn.params)
    assert sent.outvars[0].aval.dtype == BF16
    np.testing.assert_allclose(pull(jnp.float32(1.0))[0], np.cos(rounded(W)), rtol=1e-6)


def test_it_is_differentiated_twice():
    second = jax.grad(lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(jnp.sin(SENT(w))))(w) ** 2))(W)
    np.testing.assert_allclose(second, -2 * np.sin(rounded(W)) * np.cos(rounded(W)), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_it_is_vectorized(axis):
    many = jnp.stack([W, 2.0 * W, -W], axis)
    found = jax.vmap(SENT, axis, axis)(many)
    np.testing.assert_array_equal(found, rounded(many))
    jaxpr = jax.make_jaxpr(jax.vmap(SENT, axis, axis))(many)
    assert any("low" in eqn.params for eqn in equations(jaxpr))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.sum(jnp.tanh((x @ w).repeat(2, -1)) @ w.repeat(2, 0)),
        lambda w, x: jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ w.repeat(1, 1)), None), x, length=3)[0]),
    ],
)
def test_functions_of_automatic_axes_in_explicit_mode(fn):
    """`jnp.repeat` goes to automatic axes and back: nothing is sent there, and nothing can be cast."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    w, x = normal(0, 8, 8, scale=0.3), normal(1, 6, 8)
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        found = jax.jit(jax.grad(AMP(fn)))(put(w), put(x, "d"))
    assert error(np.asarray(found), in_float64(jax.grad(fn), w, x)) < 2e-2

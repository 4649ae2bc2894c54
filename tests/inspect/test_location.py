"""Which files are the user's."""

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxamp


def test_a_file_beside_the_package_is_the_users():
    from jaxamp._inspect import location as _place

    assert _place._is_the_users(str(_place.Path(_place.__file__).parents[1]) + "_train.py")
    assert not _place._is_the_users(_place.__file__)
    assert not _place._is_the_users(jnp.__file__)


def test_a_line_inside_of_a_library_is_shown_beside_the_users():
    net = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    loss = lambda net, x: jnp.sum(jax.vmap(net)(x) @ jnp.ones((4, 4)))
    report = jaxamp.amp_report(loss, compute_dtype=jnp.bfloat16)(net, jnp.ones((2, 4)))
    forward = [row.source for row in report.matmuls if row.phase == "forward"]
    assert {source.file for source in forward} == {__file__}
    inside = [source.library.rsplit(":", 1)[0] for source in forward]
    assert inside == ["equinox/nn/_linear.py", "equinox/nn/_linear.py", ""]
    assert str(forward[0]).startswith("test_location.py:")
    assert str(forward[0]).endswith(f"({forward[0].library})")
    assert f"({forward[0].library.rpartition('/')[2]})" in str(report)

    event = jaxamp.find_overflow(loss)(jax.tree.map(lambda x: 1e4 * x if eqx.is_array(x) else x, net), jnp.ones((2, 4)))
    assert event.first.source.library.startswith("equinox/nn/_linear.py:")
    found = jaxamp.compare(loss, compute_dtype=jnp.bfloat16)(net, jnp.ones((2, 4)))
    assert any("equinox/nn/_linear.py" in row.source.library for row in found.operations)

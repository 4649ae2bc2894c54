"""Which files are the user's."""

import jax.numpy as jnp


def test_a_file_beside_the_package_is_the_users():
    from jaxamp._inspect import location as _place

    assert _place._is_the_users(str(_place.Path(_place.__file__).parents[1]) + "_train.py")
    assert not _place._is_the_users(_place.__file__)
    assert not _place._is_the_users(jnp.__file__)

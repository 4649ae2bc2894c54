"""The table of JAX's primitives names primitives that there are."""

import dataclasses

import pytest

from jaxamp._compat import NOT_EVERYWHERE, primitives
from jaxamp._traits import Traits
from jaxamp._traits.jax_table import _TABLE, named


@pytest.mark.parametrize("trait", _TABLE)
def test_the_table_names_primitives_that_exist(trait):
    assert set(_TABLE[trait].split()) <= set(primitives()) | NOT_EVERYWHERE | HIGHER_ORDER_NAMES


# Names that one of the supported versions has and that no policy table may use.
HIGHER_ORDER_NAMES = {"empty2", "stage"}


def test_traits_imply_others():
    assert named("nonlinear") < named("elementwise") < named("cheap") < named("plain_params")
    assert named("reduces") < named("cheap")
    assert named("moves") < named("keeps_range")
    assert named("matmul") == named("matrix_unit")


def test_each_line_of_the_table_is_a_trait():
    fields = {field.name for field in dataclasses.fields(Traits)}
    assert set(_TABLE) <= fields


def test_a_trait_that_there_is_not():
    with pytest.raises(ValueError, match=r"got the trait 'bends'; expected one of fixed_dtype, moves"):
        named("bends")

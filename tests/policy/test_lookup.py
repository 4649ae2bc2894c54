"""Which key of a policy wins."""

import numpy as np
import pytest
from jax import lax

from jaxamp import use_compute_precision as low
from jaxamp import use_original_precision as wide
from jaxamp import use_widest_precision as widest
from jaxamp._policy.lookup import Found, Lookup
from jaxamp._primitives.attention import BACKWARD, FORWARD

ADD, EXP = lax.add_p, lax.exp_p
POLICY = {
    ADD: low,
    "head": wide,
    ("head", ADD): widest,
    "h*d": low,
    "*/deep/*": wide,
    ("lay*", EXP): low,
    FORWARD: low,
}


@pytest.mark.parametrize(
    ("path", "primitive", "key"),
    [
        ((), ADD, ADD),
        ((), EXP, None),
        (("head",), ADD, ("head", ADD)),
        (("head",), EXP, "head"),
        (("hid",), EXP, "h*d"),
        (("hid", "head"), ADD, "h*d"),  # the outermost scope
        (("head", "hid"), EXP, "head"),
        (("a", "deep", "b"), EXP, "*/deep/*"),
        (("layer",), EXP, ("lay*", EXP)),
        (("layer",), ADD, ADD),
        (("amp_stop",), ADD, "amp_stop"),
        ((), BACKWARD, FORWARD),  # the derivatives of attention follow it
    ],
)
def test_keys(path, primitive, key):
    lookup = Lookup(POLICY, np.dtype(np.float16))
    found = lookup(path, primitive)
    assert found.key == key
    assert found is lookup(path, primitive)
    assert found == Found({**POLICY, "amp_stop": wide}.get(key, wide), key)


def test_a_policy_that_changes_nothing_is_inert():
    assert Lookup({}, np.dtype(np.float16)).inert
    assert not Lookup(POLICY, np.dtype(np.float16)).inert

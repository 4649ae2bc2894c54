"""What the tests of the faces share: the same case run by a peer and by us, and a comparison to the bit."""

import inspect

import jax
from helpers import assert_same_bits

# Steps of which some overflow: one alone, two in a row.
FINITE = [True, True, False, True, True, True, True, False, False, True, True, True]


def run(module, case):
    """A case by a peer, which relies on JAX's promotion, or by us, who run under strict promotion too."""
    with jax.numpy_dtype_promotion("strict" if module.__name__.startswith("jaxamp") else "standard"):
        return case(module)


def fields(tree):
    """A loss scale as a dict of its fields, for the classes of two libraries differ."""
    is_scale = lambda x: type(x).__name__.endswith(("LossScale", "LossScaling"))
    names = lambda x: [name for name in getattr(x, "__dataclass_fields__", {}) if not name.startswith("_")]
    return jax.tree.map(
        lambda x: {name: getattr(x, name) for name in names(x)} if is_scale(x) else x, tree, is_leaf=is_scale
    )


def assert_same(theirs, ours):
    """The same structure, dtypes and bits."""
    assert_same_bits(fields(theirs), fields(ours))


def assert_accepts(theirs, ours, changed=()):
    """Each parameter of a peer's function is one of ours, in its place and with its default unless `changed`."""
    names = list(inspect.signature(theirs).parameters.values())
    mine = list(inspect.signature(ours).parameters.values())
    for x, y in zip(names, mine, strict=False):
        assert (x.name, x.kind) == (y.name, y.kind)
        if x.name not in changed:
            assert x.default is y.default or x.default == y.default
    assert len(mine) >= len(names)
    assert all(y.kind is y.KEYWORD_ONLY for y in mine[len(names) :])

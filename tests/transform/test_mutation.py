"""Arguments that a function changes in place."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, W, raises


@jax.tree_util.register_pytree_node_class
class Statistics:
    """A registered class whose objects can be changed."""

    def __init__(self, mean):
        self.mean = mean

    def tree_flatten(self):
        return (self.mean,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def replace_item(batch):
    batch["x"] = batch["x"] * 2


def add_item(batch):
    batch["new"] = batch["x"] * 2


def rename_item(batch):
    batch["z"] = batch.pop("x")


def swap_items(batch):
    batch["x"], batch["y"] = batch["y"], batch["x"]


def append_item(batch):
    batch["list"].append(batch["x"].sum())


def count_on(batch):
    batch["step"] += 1


def set_attribute(batch):
    batch["stats"].mean = batch["x"].mean(0)


def batch():
    return {"x": W, "y": W + 1, "list": [W, W], "step": 0, "stats": Statistics(W[0])}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "under jit"])
@pytest.mark.parametrize(
    ("change", "path"),
    [
        (replace_item, r"args\[0\]\['x'\]"),
        (add_item, r"args\[0\]\['new'\]"),
        (rename_item, r"args\[0\]\['z'\]"),
        (swap_items, r"args\[0\]\['x'\]"),
        (append_item, r"args\[0\]\['list'\]\[2\]"),
        (count_on, r"args\[0\]\['step'\]"),
        (set_attribute, r"args\[0\]\['stats'\]\[<flat index 0>\]"),
    ],
)
def test_a_changed_leaf_is_named(change, path, jitted):
    def fn(batch):
        change(batch)
        return batch["x"] @ W if "x" in batch else W

    with raises(ValueError, "changed its argument in place, at ", path, "on a copy", "Return the new value"):
        if jitted:
            jax.jit(lambda b: AMP(fn)({**b, "step": 0}))({k: v for k, v in batch().items() if k != "step"})
        else:
            AMP(fn)(batch())


def test_a_keyword_is_named():
    def fn(x, *, options):
        options["sum"] = x.sum()
        return x @ x

    with raises(ValueError, r"options\['sum'\]"):
        AMP(fn)(W, options={})


def test_leaves_may_be_taken_out_or_written_back():
    def fn(batch):
        y = batch.pop("y")
        first = batch["list"].pop(0)
        batch["x"] = batch["x"]
        return batch["x"] @ first + y

    given = batch()
    assert AMP(fn)(given).shape == W.shape
    assert given.keys() == batch().keys()
    assert len(given["list"]) == 2


def test_local_copies_may_change():
    def fn(batch):
        batch = {**batch, "x": batch["x"] * 2}
        batch["new"] = batch["x"]
        return batch["new"] @ W

    assert AMP(fn)(batch()).shape == W.shape


def test_a_state_of_equinox_that_was_replaced():
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="batch")

    def fn(layer, state, x):
        out, state = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return out @ W, state

    out, _ = AMP(fn)(layer, state, W)
    assert out.dtype == jnp.float32


@jax.tree_util.register_pytree_node_class
class Halved:
    """A class that computes its leaves when it is flattened."""

    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return (self.x / 2,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0] * 2)


def test_a_class_that_computes_its_leaves_is_not_taken_for_one_that_changed():
    assert AMP(lambda h: h.x @ W)(Halved(W)).shape == W.shape

"""Equinox, and what is built on it: equimo, diffrax, flowjax."""

from typing import Any

import jax
import jax.numpy as jnp

from .data import cross_entropy, labels, normal, tokens, without_state
from .registry import RULES, Model, model


def make(module: Any, loss: Any, batch: Any) -> Model:
    """`loss(module, batch)`, differentiated by the module's floating-point arrays."""
    import equinox as eqx

    params, static = eqx.partition(module, eqx.is_inexact_array)
    return Model(without_state(lambda params, batch: loss(eqx.combine(params, static), batch)), params, batch)


# -- Equinox


@model("equinox", "attention", "equinox")
def attention() -> Model:
    import equinox as eqx

    class Block(eqx.Module):
        attend: Any
        norm: Any
        mlp: Any

        def __init__(self, key: Any):
            keys = jax.random.split(key)
            self.attend = eqx.nn.MultiheadAttention(4, 64, dropout_p=0.1, key=keys[0])
            self.norm = eqx.nn.LayerNorm(64)
            self.mlp = eqx.nn.MLP(64, 64, 256, 1, jax.nn.gelu, key=keys[1])

        def __call__(self, x: Any, key: Any) -> Any:
            y = jax.vmap(self.norm)(x)
            x = x + self.attend(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)), key=key)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))

    keys = jax.random.split(jax.random.key(0), 4)
    blocks = [Block(key) for key in keys[:2]]
    module = eqx.nn.Embedding(256, 64, key=keys[2]), blocks, eqx.nn.Linear(64, 256, key=keys[3])

    def loss(module: Any, batch: Any) -> jax.Array:
        embed, blocks, head = module
        ids, targets, key = batch

        def one(ids: Any, key: Any) -> Any:
            x = jax.vmap(embed)(ids)
            for block, own in zip(blocks, jax.random.split(key, len(blocks)), strict=True):
                x = block(x, own)
            return jax.vmap(head)(x)

        return cross_entropy(jax.vmap(one)(ids, jax.random.split(key, len(ids))), targets)

    batch = tokens(0, 4, 64), tokens(1, 4, 64), jax.random.key(2)
    return make(module, loss, batch)


@model("equinox", "BatchNorm", "equinox")
def batchnorm() -> Model:
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.Conv2d(3, 16, 3, padding=1, key=keys[0]), eqx.nn.BatchNorm(16, "batch", mode="batch")]
    layers += [eqx.nn.Lambda(jax.nn.relu), eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=keys[1])]
    layers += [eqx.nn.BatchNorm(32, "batch", mode="batch"), eqx.nn.Lambda(lambda x: jax.nn.relu(x).mean((1, 2)))]
    module, state = eqx.nn.make_with_state(lambda: eqx.nn.Sequential([*layers, eqx.nn.Linear(32, 10, key=keys[2])]))()
    params, static = eqx.partition(module, eqx.is_inexact_array)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, targets = batch
        mapped = jax.vmap(eqx.combine(params, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = mapped(images, state)
        return cross_entropy(logits, targets), state

    return Model(loss, params, (normal(0, 16, 3, 16, 16), labels(1, 16)), state=state)


# -- equimo


def classify(module: Any, batch: Any) -> jax.Array:
    images, targets, key = batch
    logits = jax.vmap(lambda image, key: module(image, key=key))(images, jax.random.split(key, len(images)))
    return cross_entropy(logits, targets)


def images() -> Any:
    return normal(0, 8, 3, 32, 32), labels(1, 8), jax.random.key(2)


@model("equimo", "ViT", "equimo")
def equimo_vit() -> Model:
    from equimo.models import VisionTransformer

    sizes = {"img_size": 32, "in_channels": 3, "dim": 64, "patch_size": 4, "num_heads": 4, "depths": [2]}
    options = {"num_classes": 10, "attn_drop": 0.1, "proj_drop": 0.1, "init_values": 1.0}
    return make(VisionTransformer(**sizes, **options, key=jax.random.key(0)), classify, images())


@model("equimo", "VSSD", "equimo")
def equimo_vssd() -> Model:
    from equimo.models import Vssd

    sizes = {"dim": 32, "d_state": 16, "depths": [1, 1], "num_heads": [2, 4], "num_classes": 10}
    layers = {"attentions_layers": ("mamba2mixer", "attention")}
    return make(Vssd(32, 3, **sizes, **layers, key=jax.random.key(0)), classify, images())


@model("equimo", "ConvNeXt", "equimo")
def equimo_convnext() -> Model:
    from equimo.models import ConvNeXt

    sizes = {"in_channels": 3, "dims": [16, 32, 64], "depths": [1, 1, 1], "num_classes": 10}
    return make(ConvNeXt(**sizes, key=jax.random.key(0)), classify, images())


# -- diffrax


def field(width: int, out: int, key: Any) -> Any:
    import equinox as eqx

    return eqx.nn.MLP(width, out, 64, 2, jax.nn.softplus, key=key)


CHECKPOINTS = "what is kept are the solver's checkpoints of its state, the float32 carry of a loop"


@model("diffrax", "neural ODE", "diffrax", quick=True, kept=CHECKPOINTS, trace=RULES)
def neural_ode() -> Model:
    """As in diffrax' documentation: an MLP, Tsit5 with adaptive steps, vmapped over the batch."""
    import diffrax

    times = jnp.linspace(0.0, 1.0, 8)

    def loss(module: Any, batch: Any) -> jax.Array:
        first, targets = batch

        def solve(y: Any) -> Any:
            steps = diffrax.PIDController(rtol=1e-3, atol=1e-6)
            term, at = diffrax.ODETerm(lambda t, y, args: module(y)), diffrax.SaveAt(ts=times)
            return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.1, y, stepsize_controller=steps, saveat=at).ys

        return jnp.mean(jnp.square(jax.vmap(solve)(first) - targets))

    return make(field(16, 16, jax.random.key(0)), loss, (normal(0, 16, 16), normal(1, 16, 8, 16)))


@model("diffrax", "neural CDE", "diffrax", kept=CHECKPOINTS, trace=RULES)
def neural_cde() -> Model:
    """As in diffrax' documentation: a controlled equation along splines through the data."""
    import diffrax
    import equinox as eqx

    times = jnp.linspace(0.0, 1.0, 16)
    keys = jax.random.split(jax.random.key(0), 3)
    module = eqx.nn.Linear(4, 16, key=keys[0]), field(16, 64, keys[1]), eqx.nn.Linear(16, 10, key=keys[2])

    def loss(module: Any, batch: Any) -> jax.Array:
        initial, rates, head = module
        paths, targets = batch

        def classify(path: Any) -> Any:
            control = diffrax.CubicInterpolation(times, diffrax.backward_hermite_coefficients(times, path))
            vector = lambda t, y, args: jnp.tanh(rates(y)).reshape(16, 4)
            term = diffrax.ControlTerm(vector, control).to_ode()
            first = initial(control.evaluate(0.0))
            return head(diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, 1.0, 1 / 16, first).ys[-1])

        return cross_entropy(jax.vmap(classify)(paths), targets)

    return make(module, loss, (jnp.cumsum(normal(0, 16, 16, 4), 1) / 4, labels(1, 16)))


# -- flowjax


@model("flowjax", "coupling flow", "flowjax", quick=True)
def coupling_flow() -> Model:
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow

    spline = RationalQuadraticSpline(knots=6, interval=4)
    sizes = {"flow_layers": 3, "nn_width": 64, "nn_depth": 2, "transformer": spline}
    flow = coupling_flow(jax.random.key(0), base_dist=Normal(jnp.zeros(8)), **sizes)
    return make(flow, lambda flow, x: -flow.log_prob(x).mean(), normal(0, 64, 8) ** 3 / 4)


@model("flowjax", "autoregressive flow", "flowjax")
def autoregressive_flow() -> Model:
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow

    sizes = {"flow_layers": 3, "nn_width": 64, "nn_depth": 2}
    flow = masked_autoregressive_flow(jax.random.key(0), base_dist=Normal(jnp.zeros(8)), **sizes)
    return make(flow, lambda flow, x: -flow.log_prob(x).mean(), normal(0, 64, 8) + 1)

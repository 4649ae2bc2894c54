"""Graphs, symmetries, optimal transport, probability, and solvers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .data import cross_entropy, labels, normal, tokens, without_state
from .of_flax import nnx_model
from .registry import RULES, Model, model

# -- graphs and symmetries


def haiku_model(network: Any, loss: Any, batch: Any) -> Model:
    import haiku as hk

    transformed = hk.without_apply_rng(hk.transform(network))
    params = jax.jit(transformed.init)(jax.random.key(0), batch[0])
    apply = lambda params, batch: loss(transformed.apply(params, batch[0]), batch[1])
    return Model(without_state(apply), params, batch)


@model("jraph", "GraphNetwork", "jraph", "haiku")
def graph_network() -> Model:
    """As in jraph's examples: a graph network whose updates are Haiku MLPs."""
    import haiku as hk
    import jraph

    def network(graph: Any) -> Any:
        embed = jraph.GraphMapFeatures(hk.Linear(64), hk.Linear(64))
        update = lambda: jraph.concatenated_args(hk.nets.MLP([64, 64]))
        graph = embed(graph)._replace(globals=jnp.zeros((4, 64)))
        for _ in range(2):
            graph = jraph.GraphNetwork(update(), update(), update())(graph)
        return hk.Linear(10)(graph.globals)

    nodes, edges = 128, 512
    ends = np.random.default_rng(0).integers(0, nodes // 4, (2, 4, edges // 4)) + nodes // 4 * np.arange(4)[:, None]
    senders, receivers = jnp.asarray(ends.reshape(2, -1), jnp.int32)
    counts = jnp.full(4, nodes // 4), jnp.full(4, edges // 4)
    graph = jraph.GraphsTuple(normal(1, nodes, 16), normal(2, edges, 8), receivers, senders, None, *counts)
    return haiku_model(network, cross_entropy, (graph, labels(3, 4)))


@model("jraph", "GAT", "jraph", "haiku")
def graph_attention() -> Model:
    import haiku as hk
    import jraph

    def network(graph: Any) -> Any:
        for width in (64, 10):
            query = lambda nodes, width=width: hk.Linear(width)(nodes)
            logits = lambda sent, received, _: jax.nn.leaky_relu(hk.Linear(1)(jnp.concatenate([sent, received], -1)))
            graph = jraph.GAT(query, logits, node_update_fn=jax.nn.elu)(graph)
        return graph.nodes

    nodes, edges = 128, 512
    ends = jnp.asarray(np.random.default_rng(0).integers(0, nodes, (2, edges)), jnp.int32)
    counts = jnp.array([nodes]), jnp.array([edges])
    graph = jraph.GraphsTuple(normal(1, nodes, 16), None, ends[0], ends[1], None, *counts)
    return haiku_model(network, cross_entropy, (graph, labels(3, nodes)))


@model("e3nn-jax", "equivariant network", "e3nn_jax", "flax")
def e3nn() -> Model:
    """Messages along edges: a tensor product with spherical harmonics, weighted by an MLP of the distance."""
    import e3nn_jax as e3nn
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, batch: Any) -> Any:
            places, senders, receivers = batch
            vectors = e3nn.IrrepsArray("1o", places[receivers] - places[senders])
            harmonics = e3nn.spherical_harmonics([1, 2], vectors, True)
            lengths = e3nn.norm(vectors).array
            basis = e3nn.bessel(lengths[:, 0], 8, 4.0)
            x = e3nn.IrrepsArray("1x0e", jnp.ones((len(places), 1)))
            for irreps in ("32x0e + 8x1o + 8x2e", "32x0e + 8x1o + 8x2e"):
                x = e3nn.flax.Linear(irreps)(x)
                messages = e3nn.concatenate([x[senders], e3nn.tensor_product(x[senders], harmonics)]).regroup()
                weights = e3nn.flax.MultiLayerPerceptron([64, messages.irreps.num_irreps], jax.nn.silu)(basis)
                x = e3nn.scatter_sum(messages * weights, dst=receivers, output_size=len(places)) / 4
                x = e3nn.flax.Linear(irreps)(x)
                x = e3nn.scalar_activation(x, [jax.nn.silu, None, None])
            return e3nn.flax.Linear("10x0e")(x).array

    net = Net()
    ends = np.random.default_rng(1).integers(0, 32, (2, 128))
    ends = jnp.asarray(ends[:, ends[0] != ends[1]], jnp.int32)
    batch = (normal(0, 32, 3), *ends), labels(2, 32)
    params = jax.jit(net.init)(jax.random.key(0), batch[0])
    loss = lambda params, batch: cross_entropy(net.apply(params, batch[0]), batch[1])
    return Model(without_state(loss), params, batch)


# -- optimal transport


@model("ott-jax", "Sinkhorn divergence", "ott", "flax", trace=RULES)
def sinkhorn() -> Model:
    """A generator trained by the divergence of two clouds of points."""
    import flax.linen as nn
    from ott.geometry import pointcloud
    from ott.tools import sinkhorn_divergence

    net = nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(64), nn.gelu, nn.Dense(8)])

    def loss(params: Any, batch: Any) -> jax.Array:
        noise, data = batch
        options = {"epsilon": 0.5, "solve_kwargs": {"min_iterations": 20, "max_iterations": 20}}
        made = net.apply(params, noise)
        return sinkhorn_divergence.sinkhorn_divergence(pointcloud.PointCloud, made, data, **options)[0]

    batch = normal(0, 64, 16), normal(1, 64, 8) + 0.5
    return Model(without_state(loss), jax.jit(net.init)(jax.random.key(0), batch[0]), batch)


@model("ott-jax", "U-Net", "ott", "flax", quick=True)
def unet() -> Model:
    """The library's U-Net, trained by flow matching."""
    from flax import nnx
    from ott.neural.networks.velocity_field import unet

    sizes = {"shape": (16, 16, 3), "model_channels": 32, "num_res_blocks": 1, "channel_mult": (1, 2), "num_heads": 2}

    def module(dtype: Any) -> Any:
        return unet.UNet(**sizes, attention_resolutions=(2,), dropout=0.1, dtype=dtype, rngs=nnx.Rngs(0))

    def loss(module: Any, batch: Any) -> jax.Array:
        noise, data, t, key = batch
        at = t[:, None, None, None]
        found = module(t, (1 - at) * noise + at * data, rngs=nnx.Rngs(key))
        return jnp.mean(jnp.square(found.astype(jnp.float32) - (data - noise)))

    batch = normal(0, 4, 16, 16, 3), normal(1, 4, 16, 16, 3), jnp.linspace(0.1, 0.9, 4), jax.random.key(2)
    made = nnx_model(module, batch, loss)
    # In float16, its attention asks for an algorithm that CPUs do not have.
    return made._replace(own=lambda dtype: made.own(dtype) if dtype == jnp.bfloat16 else None)


# -- probability


@model("numpyro", "VAE", "numpyro", "flax")
def vae() -> Model:
    """The variational autoencoder of numpyro's examples, as its SVI would train it."""
    import flax.linen as nn
    import numpyro
    import numpyro.distributions as dist
    from numpyro.contrib.module import flax_module
    from numpyro.infer import SVI, Trace_ELBO

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.softplus(nn.Dense(128)(x))
            return nn.Dense(16)(x), jnp.exp(nn.Dense(16)(x))

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, z: Any) -> Any:
            return nn.sigmoid(nn.Dense(256)(nn.softplus(nn.Dense(128)(z))))

    def latent(x: Any, *parameters: Any) -> Any:
        with numpyro.plate("batch", len(x)):
            return numpyro.sample("z", dist.Normal(*parameters).to_event(1))

    def generative(x: Any) -> None:
        decode = flax_module("decoder", Decoder(), input_shape=(1, 16))
        seen = decode(latent(x, jnp.zeros((len(x), 16)), jnp.ones((len(x), 16))))
        with numpyro.plate("batch", len(x)):
            numpyro.sample("x", dist.Bernoulli(seen).to_event(1), obs=x)

    def guide(x: Any) -> None:
        latent(x, *flax_module("encoder", Encoder(), input_shape=(1, 256))(x))

    images = (normal(0, 64, 256) > 0).astype(jnp.float32)
    svi = SVI(generative, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), images))

    def loss(params: Any, batch: Any) -> jax.Array:
        key, x = batch
        return Trace_ELBO().loss(key, params, generative, guide, x) / x.size

    return Model(without_state(loss), params, (jax.random.key(1), images))


@model("distrax", "spline flow", "distrax", "haiku")
def spline_flow() -> Model:
    """The flow of distrax' examples: masked couplings of rational-quadratic splines, conditioned by Haiku MLPs."""
    import distrax
    import haiku as hk

    def density(x: Any) -> Any:
        layers = []
        for number in range(3):
            mask = jnp.arange(8) % 2 == number % 2
            last = hk.Linear(8 * 13, w_init=hk.initializers.TruncatedNormal(0.1))
            shape = hk.Reshape((8, 13), preserve_dims=-1)
            net = hk.Sequential([hk.nets.MLP([64, 64], activate_final=True), last, shape])
            spline = lambda params: distrax.RationalQuadraticSpline(params, -4.0, 4.0)
            layers.append(distrax.MaskedCoupling(mask, net, spline))
        base = distrax.Independent(distrax.Normal(jnp.zeros(8), jnp.ones(8)), 1)
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x)

    return haiku_model(density, lambda found, _: -found.mean(), (normal(0, 64, 8) ** 3 / 4, ()))


CHOLESKY = "the kernel matrix, its decomposition and the derivative of that stay in float32"


@model("tinygp", "deep kernel", "tinygp", "flax", quick=True, share=CHOLESKY)
def deep_kernel() -> Model:
    """A Gaussian process over the features of an MLP, as in tinygp's documentation."""
    import flax.linen as nn
    import tinygp

    class Process(nn.Module):
        @nn.compact
        def __call__(self, x: Any, y: Any) -> Any:
            for width in (64, 64):
                x = nn.tanh(nn.Dense(width)(x))
            x = nn.Dense(4)(x)
            noise, scale = (self.param(name, nn.initializers.zeros, ()) for name in ("noise", "scale"))
            kernel = jnp.exp(scale) * tinygp.kernels.ExpSquared()
            return tinygp.GaussianProcess(kernel, x, diag=jnp.exp(noise - 1)).log_probability(y)

    net = Process()
    x = normal(0, 64, 16)
    batch = x, jnp.sin(x[:, 0]) + 0.1 * normal(1, 64)
    params = jax.jit(net.init)(jax.random.key(0), *batch)
    return Model(without_state(lambda params, batch: -net.apply(params, *batch) / 64), params, batch, oracle=True)


# -- solvers


IMPLICIT = "the backward pass is a linear solve, an opaque primitive of lineax"
SOLVER = "what the solver iterates on stays in float32, and its own derivative rule keeps that"


@model("optimistix", "deep equilibrium", "optimistix", "equinox", share=IMPLICIT, kept=SOLVER)
def equilibrium() -> Model:
    """A network whose output is a fixed point, differentiated implicitly."""
    import optimistix

    def loss(params: Any, batch: Any) -> jax.Array:
        inner, outer, head = params
        x, targets = batch

        def settle(x: Any) -> Any:
            step = lambda z, args: jnp.tanh(z @ args[0] + args[1])
            solver = optimistix.FixedPointIteration(rtol=1e-2, atol=1e-2)
            return optimistix.fixed_point(step, solver, jnp.zeros(64), (inner, x), max_steps=30, throw=False).value

        return cross_entropy(jax.vmap(settle)(x @ outer) @ head, targets)

    params = normal(0, 64, 64) / 20, normal(1, 16, 64) / 4, normal(2, 64, 10) / 8
    return Model(without_state(loss), params, (normal(3, 32, 16), labels(4, 32)))


@model("jaxopt", "deep equilibrium", "jaxopt", kept=SOLVER, trace=RULES)
def anderson() -> Model:
    """A deep equilibrium model as in jaxopt's examples, by Anderson acceleration."""
    import jaxopt

    def step(z: Any, params: Any, x: Any) -> Any:
        return jnp.tanh(z @ params[0] + x @ params[1])

    def loss(params: Any, batch: Any) -> jax.Array:
        x, targets = batch
        solver = jaxopt.AndersonAcceleration(step, maxiter=20, tol=1e-4, history_size=5, ridge=1e-6)
        return cross_entropy(solver.run(jnp.zeros((len(x), 64)), params[:2], x).params @ params[2], targets)

    params = normal(0, 64, 64) / 20, normal(1, 16, 64) / 4, normal(2, 64, 10) / 8
    return Model(without_state(loss), params, (normal(3, 64, 16), labels(4, 64)))


@model("lineax", "ridge regression", "lineax", share="the cotangent of a matrix that is solved with stays in float32")
def ridge() -> Model:
    """Features of an MLP, and a regression on them in closed form, solved by lineax."""
    import lineax

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        features = jnp.tanh(jnp.tanh(x @ params[0]) @ params[1])
        gram = features.T @ features + jnp.eye(features.shape[1])
        operator = lineax.MatrixLinearOperator(gram, lineax.positive_semidefinite_tag)
        weights = lineax.linear_solve(operator, features.T @ y, lineax.Cholesky()).value
        return jnp.mean(jnp.square(features @ weights - y))

    x = normal(2, 128, 16)
    params = normal(0, 16, 64) / 4, normal(1, 64, 32) / 8
    return Model(without_state(loss), params, (x, jnp.sin(x[:, 0]) * x[:, 1]), oracle=True)


# -- penzai


def penzai_model(build: Any, config: Any) -> Model:
    from penzai import pz

    bound, variables = pz.unbind_params(build(config, init_base_rng=jax.random.key(0)))
    params = {v.label: v.freeze() for v in variables}

    def loss(params: Any, batch: Any) -> jax.Array:
        ids, targets = batch
        network = pz.bind_variables(bound, list(params.values()))
        return cross_entropy(network(pz.nx.wrap(ids, "batch", "seq")).unwrap("batch", "seq", "vocabulary"), targets)

    return Model(without_state(loss), params, (tokens(0, 4, 64), tokens(1, 4, 64)))


@model("penzai", "Llama", "penzai")
def penzai_llama() -> Model:
    from penzai.models.transformer.variants import llamalike_common as file

    sizes = {"num_kv_heads": 2, "query_head_multiplier": 2, "embedding_dim": 64, "projection_dim": 16}
    more = {"mlp_hidden_dim": 192, "num_decoder_blocks": 2, "vocab_size": 256, "mlp_variant": "swiglu"}
    config = file.LlamalikeTransformerConfig(**sizes, **more, tie_embedder_and_logits=False)
    return penzai_model(file.build_llamalike_transformer, config)


@model("penzai", "GPT-NeoX", "penzai")
def penzai_neox() -> Model:
    from penzai.models.transformer.variants import gpt_neox as file

    sizes = {"num_attention_heads": 4, "embedding_dim": 64, "projection_dim": 16, "mlp_hidden_dim": 256}
    more = {"num_decoder_blocks": 2, "vocab_size": 256, "activation_fn": "gelu_exact", "rope_subset_size": 4}
    dtypes = {"parameter_dtype": jnp.float32, "activation_dtype": jnp.float32}
    config = file.GPTNeoXTransformerConfig(**sizes, **more, **dtypes, rope_wavelength=1e4, layernorm_epsilon=1e-5)
    return penzai_model(file.build_gpt_neox_transformer, config)

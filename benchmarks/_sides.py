"""The sides of a training step: one network, one AdamW, and many ways to run it in low precision.

A side makes, for a `Case`, a `Step`: `run(state, x, y)` gives the next state and the loss, and `init()` the first state
and a batch. All start from the same parameters and the same batch. A side that can't run here raises `Unavailable`.

Peers come with `pip install -e '.[benchmarks]'`. Upstream jaxamp has our name, and lives in a folder of its own:

    pip install --no-deps --target peers/upstream jaxamp==0.0.4

Another folder is named with `--upstream PATH` or the environment variable `JAXAMP_UPSTREAM`.
"""

import argparse
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxamp

from ._networks import Attend, Sizes, loss_fn, make, plain_attention
from ._timing import Unavailable

OPTIMIZER = optax.adamw(1e-4)
LOW = jnp.bfloat16
Loss = Callable[[Any, Any, Any], Any]


class Case(NamedTuple):
    """What is trained."""

    network: str
    sizes: Sizes
    stacked: bool  # a scan over the layers

    @property
    def layers(self) -> str:
        return "scan" if self.stacked else "unrolled"

    def about(self) -> dict[str, Any]:
        """The part of a row that describes the case."""
        return {"network": self.network, "layers": self.layers, "sizes": self.sizes._asdict()}


class Step(NamedTuple):
    run: Callable[[Any, Any, Any], tuple[Any, Any]]
    init: Callable[[], tuple[Any, Any, Any]]


def first_state(case: Case, attend: Attend, extra: tuple[Any, ...] = ()) -> tuple[Any, Any, Any]:
    model, x, y = make(case.network, case.sizes, attend, case.stacked)
    return (model, OPTIMIZER.init(model), *extra), x, y


def adamw(case: Case, loss: Loss, attend: Attend = plain_attention) -> Step:
    """A step without loss scaling."""

    def run(state: Any, x: Any, y: Any) -> Any:
        model, opt = state
        value, grads = jax.value_and_grad(loss)(model, x, y)
        updates, opt = OPTIMIZER.update(grads, opt, model)
        return (optax.apply_updates(model, updates), opt), value

    return Step(run, lambda: first_state(case, attend))


# -- plain, and ours


def float32(case: Case) -> Step:
    """As written. On a GPU, XLA runs float32 matmuls on TF32 units."""
    return adamw(case, loss_fn)


def ours(case: Case, attend: Attend = plain_attention, **options: Any) -> Step:
    return adamw(case, jaxamp.amp(loss_fn, compute_dtype=LOW, **options), attend)


def ours_float16(case: Case) -> Step:
    """With everything that float16 needs: a dynamic scaler, and updates only from finite gradients."""
    grad_fn = jaxamp.dynamic_scale_value_and_grad(jaxamp.amp(loss_fn, compute_dtype=jnp.float16))

    def run(state: Any, x: Any, y: Any) -> Any:
        model, opt, scaler = state
        scaler, (value, grads) = grad_fn(model, x, y, dynamic_scaler_state=scaler)
        model, opt = jaxamp.update_if_finite(model, OPTIMIZER, opt, grads, scaler.finite)
        return (model, opt, scaler), value

    scaler = jaxamp.DynamicScalerState().as_arrays()
    return Step(run, lambda: first_state(case, plain_attention, (jax.tree.map(jnp.copy, scaler),)))


def ours_float16_constant(case: Case, scale: float = 2.0**15) -> Step:
    """The same numbers without the scaler's work: what float16 itself takes."""
    loss = jaxamp.amp(loss_fn, compute_dtype=jnp.float16)

    def run(state: Any, x: Any, y: Any) -> Any:
        model, opt = state
        value, grads = jax.value_and_grad(lambda *args: scale * loss(*args))(model, x, y)
        updates, opt = OPTIMIZER.update(jax.tree.map(lambda g: g / scale, grads), opt, model)
        return (optax.apply_updates(model, updates), opt), value / scale

    return Step(run, lambda: first_state(case, plain_attention))


def our_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return jaxamp.dot_product_attention(q, k, v, is_causal=causal)


# -- by hand


def careful_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attention for low operands: the softmax in float32, its result low again."""
    scores = (jnp.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5).astype(jnp.float32)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


def cudnn_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def hand_loss(model: Any, x: Any, y: Any) -> Any:
    """Parameters and inputs cast once. LayerNorm computes its statistics in float32 by itself."""
    return loss_fn(jaxamp.cast_floating(model, LOW), jaxamp.cast_floating(x, LOW), y)


def hand(case: Case) -> Step:
    return adamw(case, hand_loss, careful_attention)


def hand_cudnn(case: Case) -> Step:
    if jax.default_backend() != "gpu":
        raise Unavailable("needs a GPU")
    return adamw(case, hand_loss, cudnn_attention)


# -- peers


def mpx(case: Case) -> Step:
    """MPX as its README has it: `filter_value_and_grad` with loss scaling, and `optimizer_update`."""
    mpx = peer("mpx")
    mpx.set_half_precision_datatype(LOW)
    scaling = mpx.DynamicLossScaling(mpx.FLOAT16_MAX, min_loss_scaling=jnp.float32(1), period=2000)
    arrays, static = eqx.partition(scaling, eqx.is_array)

    def run(state: Any, x: Any, y: Any) -> Any:
        model, opt, arrays = state
        grad_fn = mpx.filter_value_and_grad(loss_fn, eqx.combine(arrays, static))
        value, scaling, finite, grads = grad_fn(model, x, y)
        model, opt = mpx.optimizer_update(model, OPTIMIZER, opt, grads, finite)
        return (model, opt, eqx.filter(scaling, eqx.is_array)), value

    return Step(run, lambda: first_state(case, plain_attention, (jax.tree.map(jnp.copy, arrays),)))


def jmp(case: Case) -> Step:
    """JMP: parameters float32, computation and inputs low, the loss float32."""
    jmp = peer("jmp")
    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=LOW, output_dtype=jnp.float32)

    def loss(model: Any, x: Any, y: Any) -> Any:
        model, x = policy.cast_to_compute((model, x))
        return policy.cast_to_output(loss_fn(model, x, y))

    return adamw(case, loss)


def upstream(case: Case) -> Step:
    """jaxamp 0.0.4 as it was published."""
    return adamw(case, upstream_module(mend=False).amp(loss_fn, compute_dtype=LOW))


def upstream_mended(case: Case) -> Step:
    """jaxamp 0.0.4 with one line changed: since jax 0.9.2 `get_bind_params` returns one dict, not a pair."""
    return adamw(case, upstream_module(mend=True).amp(loss_fn, compute_dtype=LOW))


def peer(name: str) -> ModuleType:
    if importlib.util.find_spec(name) is None:
        raise Unavailable("not installed")
    return importlib.import_module(name)


PAIR = "subfuns, bind_params = eqn.primitive.get_bind_params(eqn.params)"
DICT = "subfuns, bind_params = (), eqn.primitive.get_bind_params(eqn.params)"


@functools.cache
def upstream_module(mend: bool) -> ModuleType:
    """Upstream's module with `amp`, beside ours: run from its file, for two packages can't have one name."""
    path = Path(os.environ.get("JAXAMP_UPSTREAM", "peers/upstream")) / "jaxamp" / "_amp.py"
    if not path.is_file():
        raise Unavailable("not installed")
    code = path.read_text(encoding="utf-8")
    module = ModuleType("jaxamp_upstream")
    exec(compile(code.replace(PAIR, DICT) if mend else code, str(path), "exec"), module.__dict__)
    return module


# -- all of them


class Side(NamedTuple):
    """A way to run the step; `make` is none for those that `_torch.py` asks for."""

    title: str
    make: Callable[[Case], Step] | None


def _ours(title: str, attend: Attend = plain_attention, **options: Any) -> Side:
    return Side(f"ours, {title}" if title else "ours", functools.partial(ours, attend=attend, **options))


SIDES = {
    "float32": Side("float32", float32),
    "ours": _ours(""),
    "ours-conservative": _ours("conservative", amp_policy="conservative"),
    "ours-fast": _ours("fast", amp_policy="fast"),
    "ours-torch": _ours("torch", amp_policy="torch"),
    "ours-float16": Side("ours, float16 and scaler", ours_float16),
    "ours-float16-constant": Side("ours, float16 and a constant scale", ours_float16_constant),
    "ours-keep": _ours("keep='matmuls'", keep="matmuls"),
    "ours-attention": _ours("our attention", our_attention),
    "ours-attention-fast": _ours("fast, our attention", our_attention, amp_policy="fast"),
    "ours-attention-keep": _ours("our attention, keep='matmuls'", our_attention, keep="matmuls"),
    "mpx": Side("MPX 0.1.8", mpx),
    "jmp": Side("JMP 0.0.4", jmp),
    "upstream": Side("jaxamp 0.0.4", upstream),
    "upstream-mended": Side("jaxamp 0.0.4, one line mended", upstream_mended),
    "hand": Side("cast by hand", hand),
    "hand-cudnn": Side("cast by hand, cuDNN attention", hand_cudnn),
    "torch": Side("torch.autocast", None),
    "torch-compile": Side("torch.compile", None),
    "torch-compile-sdpa": Side("torch.compile, its attention", None),
}


def ask_for_upstream(asked: argparse.ArgumentParser) -> None:
    """The option that says where upstream jaxamp is: `upstream_module` reads what it sets."""

    class Found(argparse.Action):
        def __call__(self, asked: Any, options: Any, path: Any, option: Any = None) -> None:
            os.environ["JAXAMP_UPSTREAM"] = path

    asked.add_argument("--upstream", action=Found, metavar="PATH", help="the folder that jaxamp 0.0.4 is installed in")


def choose(asked: str) -> list[str]:
    """The sides named in an option, with commas between them."""
    names = asked.split(",")
    if unknown := [name for name in names if name not in SIDES]:
        raise SystemExit(f"There is no side {', '.join(unknown)}. Choose from {', '.join(SIDES)}.")
    return names

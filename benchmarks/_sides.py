"""The sides of a training step: one network, one AdamW, and many ways to run them in low precision.

A side turns a `Case` into a `Step`: `run(state, x, y)` returns the next state and the loss, `init()` the first state
and a batch. All sides start from the same parameters and batch. A side that can't run here raises `Unavailable`.

`pip install -e '.[benchmarks]'` installs the peers. Upstream jaxamp has the same name as this package, so it goes into
its own folder:

    pip install --no-deps --target peers/upstream jaxamp==0.0.4

To use another folder, pass `--upstream PATH` or set the environment variable `JAXAMP_UPSTREAM`.
"""

import argparse
import functools
import importlib.util
import os
from collections.abc import Callable, Collection
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
    """A network to train."""

    network: str
    sizes: Sizes
    stacked: bool  # a scan over the layers

    @property
    def layers(self) -> str:
        return "scan" if self.stacked else "unrolled"

    @property
    def title(self) -> str:
        return f"{self.network}, {self.layers}"

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
    """The loss as written. On a GPU, XLA runs float32 matmuls on TF32 units."""
    return adamw(case, loss_fn)


def ours(case: Case, attend: Attend = plain_attention, **options: Any) -> Step:
    return adamw(case, jaxamp.amp(loss_fn, compute_dtype=LOW, **options), attend)


def ours_float16(case: Case) -> Step:
    """Float16 with all that it needs: a dynamic scaler, and updates only from finite gradients."""
    grad_fn = jaxamp.dynamic_scale_value_and_grad(jaxamp.amp(loss_fn, compute_dtype=jnp.float16))

    def run(state: Any, x: Any, y: Any) -> Any:
        model, opt, scaler = state
        scaler, (value, grads) = grad_fn(model, x, y, dynamic_scaler_state=scaler)
        model, opt = jaxamp.update_if_finite(model, OPTIMIZER, opt, grads, scaler.finite)
        return (model, opt, scaler), value

    scaler = jaxamp.DynamicScalerState().as_arrays()
    return Step(run, lambda: first_state(case, plain_attention, (jax.tree.map(jnp.copy, scaler),)))


def ours_float16_constant(case: Case, scale: float = 2.0**15) -> Step:
    """The same numbers without the work of the scaler, to see the cost of float16 alone."""
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
    """Attention for low-precision operands: a float32 softmax whose result is cast back."""
    scores = (jnp.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5).astype(jnp.float32)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


def cudnn_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def hand_loss(model: Any, x: Any, y: Any) -> Any:
    """Cast parameters and inputs once. LayerNorm computes its statistics in float32 on its own."""
    return loss_fn(jaxamp.cast_floating(model, LOW), jaxamp.cast_floating(x, LOW), y)


def hand(case: Case) -> Step:
    return adamw(case, hand_loss, careful_attention)


def hand_cudnn(case: Case) -> Step:
    if jax.default_backend() != "gpu":
        raise Unavailable("needs a GPU")
    return adamw(case, hand_loss, cudnn_attention)


# -- peers


def mpx_and_scaling() -> tuple[ModuleType, Any]:
    """MPX, set to our low precision, and the loss scaling of its README."""
    mpx = peer("mpx")
    mpx.set_half_precision_datatype(LOW)
    return mpx, mpx.DynamicLossScaling(mpx.FLOAT16_MAX, min_loss_scaling=jnp.float32(1), period=2000)


def mpx(case: Case) -> Step:
    """MPX as in its README: `filter_value_and_grad` with loss scaling, and `optimizer_update`."""
    mpx, scaling = mpx_and_scaling()
    arrays, static = eqx.partition(scaling, eqx.is_array)

    def run(state: Any, x: Any, y: Any) -> Any:
        model, opt, arrays = state
        grad_fn = mpx.filter_value_and_grad(loss_fn, eqx.combine(arrays, static))
        value, scaling, finite, grads = grad_fn(model, x, y)
        model, opt = mpx.optimizer_update(model, OPTIMIZER, opt, grads, finite)
        return (model, opt, eqx.filter(scaling, eqx.is_array)), value

    return Step(run, lambda: first_state(case, plain_attention, (jax.tree.map(jnp.copy, arrays),)))


def jmp(case: Case) -> Step:
    """JMP: float32 parameters, low-precision computation and inputs, float32 loss."""
    jmp = peer("jmp")
    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=LOW, output_dtype=jnp.float32)

    def loss(model: Any, x: Any, y: Any) -> Any:
        model, x = policy.cast_to_compute((model, x))
        return policy.cast_to_output(loss_fn(model, x, y))

    return adamw(case, loss)


def upstream(case: Case) -> Step:
    """jaxamp 0.0.4 as published."""
    return adamw(case, upstream_module(fix=False).amp(loss_fn, compute_dtype=LOW))


def upstream_fixed(case: Case) -> Step:
    """jaxamp 0.0.4 with one line changed: since jax 0.9.2 `get_bind_params` returns a dict, not a pair."""
    return adamw(case, upstream_module(fix=True).amp(loss_fn, compute_dtype=LOW))


def peer(name: str) -> ModuleType:
    if importlib.util.find_spec(name) is None:
        raise Unavailable("not installed")
    return importlib.import_module(name)


PAIR = "subfuns, bind_params = eqn.primitive.get_bind_params(eqn.params)"
DICT = "subfuns, bind_params = (), eqn.primitive.get_bind_params(eqn.params)"


@functools.cache
def upstream_module(fix: bool) -> ModuleType:
    """Upstream's module with `amp`. It is run from its file, because two packages can't have the same name."""
    path = Path(os.environ.get("JAXAMP_UPSTREAM", "peers/upstream")) / "jaxamp" / "_amp.py"
    if not path.is_file():
        raise Unavailable("not installed")
    code = path.read_text(encoding="utf-8")
    module = ModuleType("jaxamp_upstream")
    exec(compile(code.replace(PAIR, DICT) if fix else code, str(path), "exec"), module.__dict__)
    return module


# -- all of them


class Side(NamedTuple):
    """A way to run the step. `make` is None for the sides that `_torch.py` runs."""

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
    "upstream-fixed": Side("jaxamp 0.0.4, one line fixed", upstream_fixed),
    "hand": Side("cast by hand", hand),
    "hand-cudnn": Side("cast by hand, cuDNN attention", hand_cudnn),
    "torch": Side("torch.autocast", None),
    "torch-compile": Side("torch.compile", None),
    "torch-compile-sdpa": Side("torch.compile, its attention", None),
}


def ask_for_upstream(asked: argparse.ArgumentParser) -> None:
    """Add the option for the folder of upstream jaxamp. It sets the variable that `upstream_module` reads."""

    class Found(argparse.Action):
        def __call__(self, asked: Any, options: Any, path: Any, option: Any = None) -> None:
            os.environ["JAXAMP_UPSTREAM"] = path

    asked.add_argument("--upstream", action=Found, metavar="PATH", help="the folder where jaxamp 0.0.4 is installed")


def choose(asked: str, among: Collection[str] = SIDES.keys(), kind: str = "side") -> list[str]:
    """The sides, or other things, that an option names, separated by commas."""
    names = asked.split(",")
    if unknown := [name for name in names if name not in among]:
        raise SystemExit(f"There is no {kind} {', '.join(unknown)}. Choose from {', '.join(among)}.")
    return names

"""How much time and memory does dynamic loss scaling add to a training step?

    python -m benchmarks.scaler [--small] [--layers 12 --width 768 --tokens 196 --batch 64]

One AdamW step of a transformer in float16 with `amp`, in four versions: without scaling; with scaling; with
`redo_on_nan`, on batches that need no redo; and with a redo written the other way, as one evaluation before the loop
and one inside it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxamp

from ._networks import Sizes, loss_fn, make
from ._tables import Column, number, parser, publish, significant
from ._timing import COMPARISON, Row, interleave, seconds

OPTIMIZER = optax.adamw(1e-4)
Step = Callable[..., Any]
TITLES = {  # with the largest ratio to accept
    "plain": ("without scaling", None),
    "scaled": ("dynamic_scale_value_and_grad", 1.05),
    "redone": ("the same, redo_on_nan=3", 1.1),
    "twice": ("a redo written twice", 1.1),
}
COLUMNS = (
    *COMPARISON,
    Column("temporary MiB", "mib", significant),
    Column("memory ratio", "memory_ratio", number(3)),
)


def plain(loss: Step) -> Step:
    def step(params: Any, opt: Any, scaler: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, scaler, value

    return step


def guarded(value_and_grad: Step) -> Step:
    def step(params: Any, opt: Any, scaler: Any, *batch: Any) -> Any:
        scaler, (value, grads) = value_and_grad(params, *batch, dynamic_scaler_state=scaler)
        params, opt = jaxamp.update_if_finite(params, OPTIMIZER, opt, grads, scaler.finite)
        return params, opt, scaler, value

    return step


def scaled(loss: Step) -> Step:
    return guarded(jaxamp.dynamic_scale_value_and_grad(loss))


def redone(loss: Step) -> Step:
    return guarded(jaxamp.dynamic_scale_value_and_grad(loss, redo_on_nan=3))


def twice(loss: Step) -> Step:
    """One evaluation before the loop, one inside it."""
    once = jaxamp.dynamic_scale_value_and_grad(loss)

    def value_and_grad(*args: Any, dynamic_scaler_state: Any) -> Any:
        def again(carry: Any) -> Any:
            (state, _), redos = carry
            return ~state.finite & (redos < 3)

        def redo(carry: Any) -> Any:
            (state, _), redos = carry
            return once(*args, dynamic_scaler_state=state), redos + 1

        first = once(*args, dynamic_scaler_state=dynamic_scaler_state)
        return jax.lax.while_loop(again, redo, (first, jnp.int32(0)))[0]

    return guarded(value_and_grad)


def measure(sizes: dict[str, int], repeats: int) -> list[dict[str, Any]]:
    params, x, y = make("vit", Sizes(heads=4, classes=100, **sizes))
    sides, bytes_ = {}, {}
    for side in (plain, scaled, redone, twice):
        state = params, OPTIMIZER.init(params), jaxamp.DynamicScalerState.static(128.0)
        state = jax.tree.map(jnp.copy, jax.tree.map(jnp.asarray, state))  # a copy, because it is donated
        step = jax.jit(side(jaxamp.amp(loss_fn)), donate_argnums=(0, 1, 2)).lower(*state, x, y).compile()
        bytes_[side.__name__] = step.memory_analysis().temp_size_in_bytes
        sides[side.__name__] = _timed(step, state, x, y)

    times = dict(zip(sides, interleave(list(sides.values()), repeats), strict=True))
    rows = []
    for name, (title, target) in TITLES.items():
        row = Row(title, times["plain"], times[name], target).as_dict()
        rows.append({**row, "mib": bytes_[name] / 2**20, "memory_ratio": bytes_[name] / bytes_["plain"]})
    return rows


def _timed(step: Step, state: tuple[Any, ...], *batch: Any) -> Callable[[], float]:
    def run() -> float:
        nonlocal state

        def once() -> Any:
            nonlocal state
            *rest, value = step(*state, *batch)
            state = tuple(rest)
            return state, value

        return seconds(once, calls=3)

    return run


def main() -> None:
    asked = parser(__doc__, "two thin layers and few repeats")
    for name, size in {"layers": 4, "width": 256, "tokens": 64, "batch": 8}.items():
        asked.add_argument(f"--{name}", type=int, default=size)
    options = asked.parse_args()
    sizes = {name: getattr(options, name) for name in ("layers", "width", "tokens", "batch")}
    if options.small:
        sizes = {"layers": 2, "width": 16, "tokens": 8, "batch": 2}
    repeats = 3 if options.small else 9
    notes = [f"{sizes}; {repeats} repeats. Plain: without scaling."]
    publish("scaler", COLUMNS, measure(sizes, repeats), notes, options.json)


if __name__ == "__main__":
    main()

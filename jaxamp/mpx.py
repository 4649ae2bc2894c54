"""MPX's interface over jaxamp: change the import to `from jaxamp import mpx`.

The law: a program written for MPX 0.1.8 runs unchanged, and gives the same bits wherever MPX's are right. Casting,
loss scaling and the optimizer step are jaxamp's own; this file gives them MPX's names. `filter_grad` and
`filter_value_and_grad` take one more keyword, `use_amp`.

>>> import equinox as eqx, jax, jax.numpy as jnp, optax
>>> from jaxamp import mpx
>>> model, optimizer = eqx.nn.Linear(2, 1, key=jax.random.key(0)), optax.sgd(0.1)
>>> optimizer_state = optimizer.init(eqx.filter(model, eqx.is_array))
>>> loss_scaling = mpx.DynamicLossScaling(mpx.FLOAT16_MAX, min_loss_scaling=jnp.ones(()), period=2000)
>>> def loss(model, batch):
...     return mpx.force_full_precision(jnp.mean)(jax.vmap(model)(batch) ** 2)
>>> loss_scaling, grads_finite, grads = mpx.filter_grad(loss, loss_scaling)(model, jnp.ones((4, 2)))
>>> model, optimizer_state = mpx.optimizer_update(model, optimizer, optimizer_state, grads, grads_finite)

Differences from MPX 0.1.8, each because of a fault in it:

1. Gradients and loss are divided by the scale they were made with. MPX divides by the next one, so a step that raises
   the scale halves them.
2. A float16 loss is returned as it is. MPX multiplies it by the scale first, and returns inf if that overflows.
3. A scale that is not a power of two, such as `FLOAT16_MAX`, costs no precision: if the loss is float16, the backward
   pass starts from a power of two.
4. `scale` multiplies in float32 or wider. MPX casts the scale to float16, where 2**16 is inf.
5. `scale` and `unscale` leave integers, PRNG keys and non-numeric leaves alone. MPX turns integers into floats and
   raises an error for the others. So does its `all_finite` for non-numeric leaves.
6. The floor of a scale is positive, even if `min_loss_scaling` is zero. MPX's scale falls to zero and stays there.
7. The scale is held in float32, whatever numbers it is made from. MPX refuses Python numbers, and its `adjust` raises
   an error for float16 ones.
8. `set_half_precision_datatype` accepts names. MPX checks them and then ignores them.
9. `HALF_PRECISION_DATATYPE` is the current dtype. MPX's is the one at import.
10. `force_full_precision` returns the half precision in use unless told otherwise. MPX returns float16 even if
    bfloat16 is in use.
11. `cast_function` casts results of any structure, and the arrays of a function that is a pytree. MPX casts arrays and
    plain tuples.
12. NumPy's float64 is cast where JAX would turn it into float32. MPX leaves it, and float32 creeps in.
13. `select_tree` selects numbers, and leaves whose dtypes differ. MPX takes Python numbers from the first tree whatever
    the predicate is, and raises an error if dtypes differ.
14. Without mixed precision, gradients are float32 too. In MPX that holds only for `filter_grad` without aux.
15. Errors say what was given, what was expected and what to write. MPX has assertions, which `python -O` removes. The
    error for a condition that is not one bool is an AssertionError too, for programs that catch MPX's.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._scaling.checked_scalar import check_condition, checked_scalar
from ._scaling.grad import dynamic_scale_value_and_grad
from ._scaling.period_counters import counter_from_state, state_from_counter
from ._scaling.scale_tree import scale_tree, unscale_tree
from ._scaling.state import DynamicScalerState
from ._scaling.update import update_if_finite
from ._transform.amp import amp, amp_stop
from ._transform.loss_scaling import note_own_scale
from ._tree import all_finite as all_finite
from ._tree import cast_floating, is_array_or_number, is_inexact_array, tree_where

if TYPE_CHECKING:
    HALF_PRECISION_DATATYPE: Any
    FLOAT16_MAX: jax.Array
    BFLOAT16_MAX: jax.Array

Tree = TypeVar("Tree")

_FLOAT16_MAX, _BFLOAT16_MAX = (float(jnp.finfo(x).max) for x in (jnp.float16, jnp.bfloat16))

__all__ = [
    "DynamicLossScaling",
    "all_finite",
    "calculate_scaled_grad",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "half_precision_datatype",
    "optimizer_update",
    "scaled",
    "select_tree",
    "set_half_precision_datatype",
]


# -- the half precision in use

_HALF_DTYPES = {np.dtype(x): x for x in (jnp.float16, jnp.bfloat16)}
_half_dtype: Any = jnp.float16


def half_precision_datatype() -> Any:
    """The dtype used as half precision: `jnp.float16` unless set otherwise.

    Returns:
        A dtype.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> mpx.half_precision_datatype().__name__
    'float16'
    """
    return _half_dtype


def set_half_precision_datatype(datatype: Any) -> None:
    """Set the dtype used as half precision.

    Args:
        datatype: `jnp.float16` or `jnp.bfloat16`, or its name.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> mpx.set_half_precision_datatype(jnp.bfloat16)
    >>> mpx.cast_to_half_precision(jnp.ones(2)).dtype.name
    'bfloat16'
    >>> mpx.set_half_precision_datatype(jnp.float16)

    **Sharp edges**

    - It applies to the whole process, and functions that are already compiled keep the dtype they were compiled with.
      Set it once, at the beginning.
    """
    global _half_dtype
    try:
        _half_dtype = _HALF_DTYPES[jnp.dtype(datatype)]
    except (TypeError, KeyError) as error:
        raise (ValueError if isinstance(datatype, str) else TypeError)(
            f"set_half_precision_datatype got {datatype!r}; expected float16 or bfloat16. "
            "Write set_half_precision_datatype(jnp.bfloat16), or 'bfloat16'."
        ) from error


def __getattr__(name: str) -> Any:
    """Attributes that change or are arrays: computed here, so that importing this module starts no backend."""
    match name:
        case "HALF_PRECISION_DATATYPE":
            return _half_dtype
        case "FLOAT16_MAX":
            return jnp.float32(_FLOAT16_MAX)
        case "BFLOAT16_MAX":
            return jnp.float32(_BFLOAT16_MAX)
    raise AttributeError(f"module 'jaxamp.mpx' has no attribute {name!r}")


# -- casting


def cast_tree(tree: Tree, dtype: Any) -> Tree:
    """Cast the arrays of a pytree that are float16, bfloat16 or float32.

    Args:
        tree: Any pytree.
        dtype: The dtype.

    Returns:
        The pytree, in that dtype.

    >>> from jaxamp import mpx
    >>> mpx.cast_tree({"w": jnp.ones(2), "step": jnp.int32(3)}, jnp.float16)
    {'step': Array(3, dtype=int32), 'w': Array([1., 1.], dtype=float16)}
    """
    return jax.tree.map(lambda x: cast_floating(x, dtype) if _is_float_up_to_32_bits(x) else x, tree)


def _is_float_up_to_32_bits(x: Any) -> bool:
    """Whether JAX sees a float of at most 32 bits. It sees NumPy's float64 as float32, unless asked for 64 bits."""
    return is_inexact_array(x) and jax.dtypes.canonicalize_dtype(x.dtype) in (jnp.float16, jnp.bfloat16, jnp.float32)


def cast_to_float16(x: Tree) -> Tree:
    """`cast_tree` to float16.

    Args:
        x: Any pytree.

    Returns:
        The pytree, in that dtype.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> mpx.cast_to_float16({"w": jnp.ones(2)})["w"].dtype.name
    'float16'
    """
    return cast_tree(x, jnp.float16)


def cast_to_bfloat16(x: Tree) -> Tree:
    """`cast_tree` to bfloat16.

    Args:
        x: Any pytree.

    Returns:
        The pytree, in that dtype.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> mpx.cast_to_bfloat16({"w": jnp.ones(2)})["w"].dtype.name
    'bfloat16'
    """
    return cast_tree(x, jnp.bfloat16)


def cast_to_float32(x: Tree) -> Tree:
    """`cast_tree` to float32.

    Args:
        x: Any pytree.

    Returns:
        The pytree, in that dtype.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> mpx.cast_to_float32({"w": jnp.ones(2)})["w"].dtype.name
    'float32'
    """
    return cast_tree(x, jnp.float32)


def cast_to_full_precision(x: Tree) -> Tree:
    """`cast_tree` to float32.

    Args:
        x: Any pytree.

    Returns:
        The pytree, in that dtype.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> mpx.cast_to_full_precision({"w": jnp.ones(2)})["w"].dtype.name
    'float32'
    """
    return cast_tree(x, jnp.float32)


def cast_to_half_precision(x: Tree) -> Tree:
    """`cast_tree` to `half_precision_datatype()`.

    Args:
        x: Any pytree.

    Returns:
        The pytree, in that dtype.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> mpx.cast_to_half_precision({"w": jnp.ones(2)})["w"].dtype.name
    'float16'
    """
    return cast_tree(x, half_precision_datatype())


def cast_function(func: Callable[..., Any], dtype: Any, return_dtype: Any = None) -> Callable[..., Any]:
    """Call a function with its arguments cast.

    Args:
        func: The function. If it is a pytree, such as an Equinox module, its own arrays are cast too.
        dtype: The dtype of the arguments' floats.
        return_dtype: The dtype of the results' floats; `None` is `dtype`.

    Returns:
        A function like `func`.

    >>> from jaxamp import mpx
    >>> mpx.cast_function(lambda x: {"y": x * 2}, jnp.float16, jnp.float32)(jnp.ones(2))
    {'y': Array([2., 2.], dtype=float32)}
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        fn, args, kwargs = cast_tree((func, args, kwargs), dtype)
        return cast_tree(fn(*args, **kwargs), dtype if return_dtype is None else return_dtype)

    return wrapper


def force_full_precision(func: Callable[..., Any], return_dtype: Any = half_precision_datatype) -> Callable[..., Any]:
    """Run a function in float32: a sum, a mean, a softmax.

    Under `use_amp` it also acts as `jaxamp.amp_stop`.

    Args:
        func: The function.
        return_dtype: The dtype of the results' floats. The default is the half precision in use when the function is
            called; `None` is float32.

    Returns:
        A function like `func`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> mpx.force_full_precision(jnp.sum, jnp.float16)(jnp.ones(4, jnp.float16)).dtype.name
    'float16'
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtype = half_precision_datatype() if return_dtype is half_precision_datatype else return_dtype
        with amp_stop():
            return cast_function(func, jnp.float32, dtype)(*args, **kwargs)

    return wrapper


# -- loss scaling


class DynamicLossScaling(eqx.Module):
    """A loss scale that doubles after `period` finite steps, and is halved at an overflow.

    A pytree, to be carried from step to step. It moves by the rule of `jaxamp.DynamicScalerState`.

    Attributes:
        loss_scaling: The scale, float32. It may be infinite where nothing is scaled, with `use_mixed_precision=False`.
        min_loss_scaling: The scale is not lowered below this.
        counter: Finite steps in this period.
        factor: The scale is raised and lowered by this factor. The scale is never raised above 65504.
        period: How many finite steps it takes to raise the scale.

    >>> from jaxamp import mpx
    >>> scaling = mpx.DynamicLossScaling(8.0, min_loss_scaling=1.0, period=2)
    >>> [float((scaling := scaling.adjust(finite)).loss_scaling) for finite in (True, True, False)]
    [8.0, 16.0, 8.0]
    """

    loss_scaling: jax.Array
    min_loss_scaling: jax.Array
    counter: jax.Array
    factor: int
    period: int

    def __init__(
        self, loss_scaling: Any, min_loss_scaling: Any, factor: Any = 2, period: Any = 2000, counter: Any = None
    ):
        note_own_scale()
        name, counter = "DynamicLossScaling", 0 if counter is None else counter
        self.loss_scaling = checked_scalar(name, "loss_scaling", loss_scaling, np.float32, "2.0**15", finite=False)
        self.min_loss_scaling = checked_scalar(
            name, "min_loss_scaling", min_loss_scaling, np.float32, "1.0", positive=False
        )
        self.counter = checked_scalar(name, "counter", counter, np.int32, "0", positive=False)
        checked_scalar(name, "factor", factor, np.float32, "2")
        checked_scalar(name, "period", period, np.int32, "2000")
        self.factor, self.period = factor, period

    def scale(self, tree: Tree) -> Tree:
        """Multiply a pytree's floats by the scale, in float32 or wider.

        Args:
            tree: Any pytree.

        Returns:
            The pytree, scaled.
        """
        return scale_tree(tree, self.loss_scaling)

    def unscale(self, tree: Tree) -> Tree:
        """Divide a pytree's floats by the scale, in float32 or wider.

        Args:
            tree: Any pytree.

        Returns:
            The pytree, unscaled.
        """
        return unscale_tree(tree, self.loss_scaling)

    def adjust(self, grads_finite: Any) -> "DynamicLossScaling":
        """The next loss scaling, given whether this step's gradients were finite.

        Args:
            grads_finite: Whether the gradients were finite, a scalar bool.

        Returns:
            The loss scale of the next step.
        """
        check_condition("adjust", grads_finite, "loss_scaling.adjust(mpx.all_finite(grads))")
        return self._with_state(self._as_state().adjust(grads_finite))

    def _as_state(self) -> DynamicScalerState:
        return state_from_counter(
            self.loss_scaling, self.counter, self.factor, self.period, self.min_loss_scaling, maximum=_FLOAT16_MAX
        )

    def _with_state(self, state: DynamicScalerState) -> "DynamicLossScaling":
        """The loss scaling after a step. Both bounds hold, even if the scale started outside them."""
        scale = jnp.clip(state.scaler, state.min_scaler, state.max_scaler)
        return eqx.tree_at(lambda x: (x.loss_scaling, x.counter), self, (scale, counter_from_state(state)))


def scaled(func: Callable[..., Any], scaling: DynamicLossScaling, has_aux: bool = False) -> Callable[..., Any]:
    """Scale the result of a function; with `has_aux`, the first of its two results.

    Args:
        func: A function.
        scaling: The loss scaling of this step.
        has_aux: Whether `func` returns `(loss, aux)`.

    Returns:
        A function like `func`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> scaling = mpx.DynamicLossScaling(2.0**10, 1.0)
    >>> float(mpx.scaled(jnp.sum, scaling)(jnp.ones(2)))
    2048.0
    """
    _check_scaling("scaled", scaling)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not has_aux:
            return scaling.scale(func(*args, **kwargs))
        value, aux = func(*args, **kwargs)
        return scaling.scale(value), aux

    return wrapper


def select_tree(pred: Any, a: Tree, b: Tree) -> Tree:
    """Return `a` if the scalar bool `pred` holds, else `b`. Leaves that aren't arrays or numbers come from `a`.

    Args:
        pred: A scalar bool.
        a: A pytree.
        b: A pytree of the same structure.

    Returns:
        A pytree like both.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> float(mpx.select_tree(jnp.array(False), jnp.ones(()), jnp.zeros(())))
    0.0
    """
    check_condition("select_tree", pred, "select_tree(mpx.all_finite(grads), new, old)")
    return tree_where(pred, a, jax.tree.map(lambda x, y: y if is_array_or_number(x) else x, a, b))


# -- gradients


def filter_grad(
    func: Callable[..., Any],
    scaling: DynamicLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    use_amp: bool = False,
) -> Callable[..., Any]:
    """Differentiate a loss in mixed precision, with dynamic loss scaling.

    Args:
        func: The loss. Gradients are taken with respect to the floating-point arrays of its first argument, as in
            `equinox.filter_grad`.
        scaling: The loss scaling of this step.
        has_aux: Whether `func` returns `(loss, aux)`.
        use_mixed_precision: If `False`, this is `equinox.filter_grad`: arguments are not cast, and nothing is scaled.
        use_amp: Run `jaxamp.amp(func)`, which chooses a precision for each operation, instead of casting all arguments
            to half precision. The loss can then do without `force_full_precision`.

    Returns:
        A function like `func` that returns `(scaling, grads_finite, grads)`, or `(scaling, grads_finite, grads, aux)`:
        the next loss scaling, whether the gradients are finite, and the gradients in float32.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> scaling = mpx.DynamicLossScaling(2.0**10, 1.0)
    >>> scaling, finite, grads = mpx.filter_grad(jnp.square, scaling)(jnp.float32(3))
    >>> bool(finite), float(grads)
    (True, 6.0)

    **Sharp edges**

    - Non-finite gradients are returned as they are. Pass `grads_finite` to `optimizer_update`.
    - With `use_amp`, call it inside `jit`. Outside, each call compiles the loss again.
    """
    _check_scaling("filter_grad", scaling, use_mixed_precision)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        step = _differentiate(func, scaling, has_aux, use_mixed_precision, use_amp)
        out, next_scaling, finite, grads = step(*args, **kwargs)
        return (next_scaling, finite, grads, out[1]) if has_aux else (next_scaling, finite, grads)

    return wrapper


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: DynamicLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    use_amp: bool = False,
) -> Callable[..., Any]:
    """Like `filter_grad`, with the loss: `(value, scaling, grads_finite, grads)`, or `((value, aux), ...)`.

    Args:
        func: The loss.
        scaling: The loss scaling of this step.
        has_aux: Whether `func` returns `(loss, aux)`.
        use_mixed_precision: If `False`, this is `equinox.filter_value_and_grad`.
        use_amp: Run `jaxamp.amp(func)` instead of casting all arguments to half precision.

    Returns:
        A function like `func` that returns `(value, scaling, grads_finite, grads)`, or `((value, aux), scaling,
        grads_finite, grads)`.

    >>> from jaxamp import mpx
    >>> scaling = mpx.DynamicLossScaling(2.0**10, 1.0, period=1)
    >>> value, scaling, finite, grads = mpx.filter_value_and_grad(jnp.square, scaling)(jnp.float32(3))
    >>> float(value), float(grads), float(scaling.loss_scaling)
    (9.0, 6.0, 2048.0)
    """
    _check_scaling("filter_value_and_grad", scaling, use_mixed_precision)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _differentiate(func, scaling, has_aux, use_mixed_precision, use_amp)(*args, **kwargs)

    return wrapper


def _differentiate(
    func: Callable[..., Any], scaling: DynamicLossScaling, has_aux: bool, use_mixed_precision: bool, use_amp: bool
) -> Callable[..., Any]:
    def plain(*args: Any, **kwargs: Any) -> Any:
        out, grads = eqx.filter_value_and_grad(func, has_aux=has_aux)(*args, **kwargs)
        return out, scaling, jnp.array(True), cast_to_full_precision(grads)

    def mixed(*args: Any, **kwargs: Any) -> Any:
        if use_amp:
            loss: Callable[..., Any] = amp(func, compute_dtype=half_precision_datatype())
        else:
            loss, (args, kwargs) = func, cast_to_half_precision((args, kwargs))
        step = dynamic_scale_value_and_grad(loss, has_aux=has_aux)
        state, (out, grads) = step(*args, dynamic_scaler_state=scaling._as_state(), **kwargs)
        out = (cast_to_full_precision(out[0]), out[1]) if has_aux else cast_to_full_precision(out)
        return out, scaling._with_state(state), state.finite, grads

    return mixed if use_mixed_precision else plain


def calculate_scaled_grad(
    func: Callable[..., Any], scaling: DynamicLossScaling, has_aux: bool = False, use_mixed_precision: bool = True
) -> Callable[..., Any]:
    """Compute the loss and its gradients, both scaled, for `scaling.unscale`. The gradients are in half precision.

    The function returns `(value, grads)`, or `((value, aux), grads)`. For unscaled ones, use `filter_value_and_grad`,
    which never multiplies the loss.

    Args:
        func: The loss.
        scaling: The loss scaling of this step.
        has_aux: Whether `func` returns `(loss, aux)`.
        use_mixed_precision: If `False`, nothing is cast or scaled.

    Returns:
        A function like `func`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import mpx
    >>> scaling = mpx.DynamicLossScaling(2.0**10, 1.0)
    >>> value, grads = mpx.calculate_scaled_grad(jnp.square, scaling)(jnp.float32(3))
    >>> float(value), float(scaling.unscale(grads))
    (9216.0, 6.0)
    """
    _check_scaling("calculate_scaled_grad", scaling, use_mixed_precision)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not use_mixed_precision:
            return eqx.filter_value_and_grad(func, has_aux=has_aux)(*args, **kwargs)
        args, kwargs = cast_to_half_precision((args, kwargs))
        return eqx.filter_value_and_grad(scaled(func, scaling, has_aux), has_aux=has_aux)(*args, **kwargs)

    return wrapper


def optimizer_update(
    model: Tree, optimizer: optax.GradientTransformation, optimizer_state: Any, grads: Any, grads_finite: Any
) -> tuple[Tree, Any]:
    """Take an optimizer step if the gradients are finite: `jaxamp.update_if_finite`.

    Args:
        model: The parameters.
        optimizer: An Optax optimizer.
        optimizer_state: Its state.
        grads: The gradients.
        grads_finite: Whether they are finite, a scalar bool.

    Returns:
        The model and the state of the optimizer.

    >>> import jax.numpy as jnp, optax
    >>> from jaxamp import mpx
    >>> model, tx = jnp.ones(2), optax.sgd(0.5)
    >>> model, state = mpx.optimizer_update(model, tx, tx.init(model), jnp.ones(2), jnp.array(True))
    >>> model.tolist()
    [0.5, 0.5]
    """
    instead = "the grads_finite that filter_grad returned, or mpx.all_finite(grads)"
    check_condition("optimizer_update", grads_finite, instead)
    return update_if_finite(model, optimizer, optimizer_state, grads, grads_finite)


# -- bad input


def _check_scaling(name: str, scaling: Any, is_used: bool = True) -> None:
    if not isinstance(scaling, DynamicLossScaling):
        raise TypeError(
            f"{name} got {scaling!r}, of type {type(scaling).__name__}, as its loss scaling; expected a "
            f"jaxamp.mpx.DynamicLossScaling. Write mpx.{name}(loss, mpx.DynamicLossScaling(2.0**15, 1.0))."
        )
    if is_used and not isinstance(scaling.loss_scaling, jax.core.Tracer) and np.isinf(scaling.loss_scaling):
        raise ValueError(
            f"{name} got a loss scaling of inf; expected a finite one, unless use_mixed_precision=False. Write "
            f"mpx.{name}(loss, mpx.DynamicLossScaling(2.0**15, 1.0))."
        )

"""The state of a dynamic loss scaler, and the rule by which it moves.

The law: the scale is never infinite, zero or NaN, and it only moves by the rule below. Gradients are divided by the
scale they were made with, never by the next one (`evaluation.py`).

    on a finite step:
        skipped = 0
        micro += 1
        if micro == accumulate:                       # all micro-batches of an optimizer step are in
            micro = 0
            if count >= patience:
                scaler = min(scaler * adjust_factor, max_scaler)
                count = overflows = 0
            else:
                count += 1
    on a step with an infinite or NaN gradient:
        skipped += 1, total_resets += 1, count = 0
        overflows = min(overflows + 1, hysteresis)
        if overflows == hysteresis:
            scaler = max(scaler * backoff_factor, min_scaler)
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import check_bool

Scalar = Any  # an array without dimensions, or a Python number
_TINY, FLOAT32_MAX = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


class DynamicScalerState(NamedTuple):
    """A dynamic loss scaler: a pytree of scalars, to be carried from step to step and saved in checkpoints.

    Each field may be an array, a NumPy scalar or a Python number. The first five fields are those of jaxamp 0.0.4.
    `state.as_arrays()` turns all fields into arrays, which you need in four cases: Orbax restores only into arrays;
    `scan` and `cond` require the dtypes that a step returns; Equinox treats Python numbers as static; and a step that
    starts from Python numbers is traced a second time when they come back as arrays.

    Attributes:
        patience: How many finite steps to wait before the one that raises the scale; with 0, each of them does.
        adjust_factor: The scale is raised by this factor.
        scaler: The loss scale of the next step.
        count: Finite steps since the scale last changed.
        total_resets: How often gradients were infinite or NaN, recomputed ones included.
        min_scaler: The scale is not lowered below this. May be less than 1. The default is float16's smallest normal
            number: below it, the gradient of the loss itself would underflow.
        max_scaler: The scale is not raised above this. A scale that starts outside the bounds is not moved into them.
        backoff_factor: The scale is lowered by this factor; `None` is `1 / adjust_factor`.
        hysteresis: How many overflows it takes to lower the scale. The count restarts when the scale is raised.
        overflows: Overflows counted towards `hysteresis` so far.
        accumulate: Micro-batches per optimizer step, as for `optax.MultiSteps`. `count` and `patience` are in optimizer
            steps, and the scale is raised only between two of them.
        micro: Finite micro-batches of the current optimizer step.
        skipped: Steps skipped in a row: zero if the last gradients were finite.
        total_redos: How often gradients were recomputed at a smaller scale (`redo_on_nan`).
        underflow: The share of entries of the last finite gradients that were zero, or subnormal in float16, at the
            scale they were made with. It includes entries that are zero at any scale.

    >>> state = DynamicScalerState(patience=1, scaler=8.0)
    >>> [float((state := state.adjust(finite)).scaler) for finite in (True, True, False)]
    [8.0, 16.0, 8.0]
    """

    # NumPy scalars have the dtypes of the arrays that later steps return, and start no backend.
    patience: Scalar = np.int32(2000)
    adjust_factor: Scalar = np.float32(2.0)
    scaler: Scalar = np.float32(2**15)
    count: Scalar = np.int32(0)
    total_resets: Scalar = np.int32(0)
    min_scaler: Scalar = np.float32(2**-14)
    max_scaler: Scalar = np.float32(2**24)
    backoff_factor: Scalar | None = None
    hysteresis: Scalar = np.int32(1)
    overflows: Scalar = np.int32(0)
    accumulate: Scalar = np.int32(1)
    micro: Scalar = np.int32(0)
    skipped: Scalar = np.int32(0)
    total_redos: Scalar = np.int32(0)
    underflow: Scalar = np.float32(0.0)

    # -- common schemes

    @classmethod
    def torch(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        accumulate: int = 1,
    ) -> Self:
        """PyTorch's `GradScaler`: bounded only by the range of float32.

        Args:
            init_scale: The first scale.
            growth_factor: The scale is raised by this factor.
            backoff_factor: The scale is lowered by this factor.
            growth_interval: How many finite steps in a row raise the scale.
            accumulate: Micro-batches per optimizer step.

        Returns:
            The state to start from.

        >>> float(DynamicScalerState.torch(accumulate=4).scaler)
        65536.0
        """
        return cls._scheme("torch", growth_interval, growth_factor, backoff_factor, init_scale, _TINY, 1, accumulate)

    @classmethod
    def deepspeed(
        cls,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: float = 1.0,
        accumulate: int = 1,
    ) -> Self:
        """DeepSpeed's `fp16` section: the first overflow after a raise is tolerated.

        Args:
            initial_scale_power: The first scale is two to this power.
            loss_scale_window: How many finite steps in a row raise the scale.
            hysteresis: How many overflows lower the scale.
            min_loss_scale: The scale is not lowered below this.
            accumulate: Micro-batches per optimizer step.

        Returns:
            The state to start from.

        >>> float(DynamicScalerState.deepspeed(initial_scale_power=12).scaler)
        4096.0
        """
        scale = 2.0**initial_scale_power
        return cls._scheme("deepspeed", loss_scale_window, 2.0, 0.5, scale, min_loss_scale, hysteresis, accumulate)

    @classmethod
    def megatron(
        cls,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        accumulate: int = 1,
    ) -> Self:
        """Megatron's `DynamicGradScaler`.

        Args:
            initial_scale: The first scale.
            min_scale: The scale is not lowered below this.
            growth_factor: The scale is raised by this factor.
            backoff_factor: The scale is lowered by this factor.
            growth_interval: How many finite steps in a row raise the scale.
            hysteresis: How many overflows lower the scale.
            accumulate: Micro-batches per optimizer step.

        Returns:
            The state to start from.

        >>> float(DynamicScalerState.megatron().scaler)
        4294967296.0
        """
        return cls._scheme(
            "megatron", growth_interval, growth_factor, backoff_factor, initial_scale, min_scale, hysteresis, accumulate
        )

    @classmethod
    def static(cls, scale: float, accumulate: int = 1) -> Self:
        """A scale that never moves. Overflows are still detected and counted.

        Args:
            scale: The scale.
            accumulate: Micro-batches per optimizer step.

        Returns:
            The state to start from.

        >>> float(DynamicScalerState.static(128.0).adjust(False).scaler)
        128.0
        """
        return _as_numpy("static", cls(adjust_factor=1.0, scaler=scale, accumulate=accumulate))

    @classmethod
    def no_op(cls, accumulate: int = 1) -> Self:
        """A scale of one, for bfloat16 and float32: the same training step, without scaling.

        Args:
            accumulate: Micro-batches per optimizer step.

        Returns:
            The state to start from.

        >>> float(DynamicScalerState.no_op().scaler)
        1.0
        """
        return cls.static(1.0, accumulate)

    @classmethod
    def _scheme(
        cls,
        name: str,
        interval: int,
        growth: float,
        backoff: float,
        scale: float,
        minimum: float,
        hysteresis: int,
        accumulate: int,
    ) -> Self:
        """A scheme whose `interval` between raises includes the raising step, which `patience` does not count."""
        if isinstance(interval, bool) or not isinstance(interval, int | np.integer) or interval < 1:
            raise ValueError(
                f"DynamicScalerState.{name} got an interval of {interval!r} between two raises of the scale; expected "
                f"a whole number of steps, 1 or more. Leave it out for the scheme's default, as in "
                f"DynamicScalerState.{name}()."
            )
        return _as_numpy(
            name,
            cls(
                patience=interval - 1,
                adjust_factor=growth,
                scaler=scale,
                min_scaler=minimum,
                max_scaler=FLOAT32_MAX,
                backoff_factor=backoff,
                hysteresis=hysteresis,
                accumulate=accumulate,
            ),
        )

    # -- the rule

    @property
    def finite(self) -> jax.Array:
        """Whether the last gradients were finite, as a scalar bool, for `update_if_finite`."""
        return jnp.equal(self.skipped, 0)

    def adjust(self, finite: Scalar) -> Self:
        """The next state.

        Args:
            finite: Whether this step's gradients were finite, a scalar bool.

        Returns:
            The state, with its fields as arrays.
        """
        check_bool("adjust", finite, "state.adjust(jaxamp.all_finite(grads))")
        s, finite = self.as_arrays(), jnp.asarray(finite)
        micro = jnp.where(finite, s.micro + 1, s.micro)
        complete = finite & (micro >= s.accumulate)
        up = complete & (s.count >= s.patience)
        overflows = jnp.where(finite, jnp.where(up, 0, s.overflows), jnp.minimum(s.overflows + 1, s.hysteresis))
        down = ~finite & (overflows >= s.hysteresis)
        return s._replace(
            scaler=jnp.where(up, s._raised(), jnp.where(down, s.lowered(s.scaler), s.scaler)),
            count=jnp.where(up | ~finite, 0, s.count + complete.astype(jnp.int32)),
            total_resets=s.total_resets + (~finite).astype(jnp.int32),
            overflows=overflows,
            micro=jnp.where(complete, 0, micro),
            skipped=jnp.where(finite, 0, s.skipped + 1),
        )

    def _raised(self) -> jax.Array:
        """The scale after a raise. Bounds limit moves but cause none: a scale that starts above `max_scaler` stays."""
        raised = self.scaler * self.adjust_factor
        bounded = jnp.maximum(self.scaler, jnp.minimum(raised, self.max_scaler))
        return jnp.where(jnp.isfinite(raised), bounded, self.scaler)

    def lowered(self, scale: jax.Array) -> jax.Array:
        """The scale after an overflow; unchanged if it can't fall any further.

        Args:
            scale: The scale that overflowed.

        Returns:
            The lower scale.
        """
        lowered = scale / self.adjust_factor if self.backoff_factor is None else scale * self.backoff_factor
        return jnp.minimum(scale, jnp.maximum(lowered, self._floor()))

    def _floor(self) -> jax.Array:
        return jnp.where(self.min_scaler > _TINY, self.min_scaler, _TINY)

    def as_arrays(self) -> Self:
        """Turn each field into an array of its own dtype.

        A scale that is infinite, NaN or not positive can't be refused inside `jit`; it becomes the nearest valid one.

        Returns:
            The state.
        """
        s = type(self)(*(None if x is None else jnp.asarray(x, dtype) for x, dtype in zip(self, _DTYPES, strict=True)))
        return s._replace(scaler=jnp.where(s.scaler > 0, jnp.minimum(s.scaler, FLOAT32_MAX), s._floor()))


_DTYPES = tuple(np.float32 if x is None else x.dtype for x in DynamicScalerState())
DynamicLossScaler = DynamicScalerState


def _as_numpy(name: str, state: DynamicScalerState) -> Any:
    """Convert a state's Python numbers to NumPy scalars of its dtypes, so that the second step needs no new trace."""
    for field, value in state._asdict().items():
        if value is not None:
            _check_number(f"DynamicScalerState.{name}", field, value)
    with np.errstate(over="ignore"):  # check_state refuses numbers that overflow
        dtypes = map(np.dtype, _DTYPES)
        state = type(state)(*(None if x is None else dtype.type(x) for x, dtype in zip(state, dtypes, strict=True)))
    check_state(f"DynamicScalerState.{name}", state)
    return state


def scaler_metrics(state: DynamicScalerState) -> dict[str, float | int]:
    """Summarize a state as Python numbers, for logging. Waits for the step that computes the state.

    Args:
        state: A state, outside of `jit`.

    Returns:
        A dict. `scale` is the scale of the next step, `skipped` the number of steps skipped in a row, `total_skipped`
        the number skipped so far, `total_redone` how often gradients were recomputed, and `underflow` the share of
        gradient entries that were zero, or subnormal in float16, in the last finite step.

    >>> scaler_metrics(DynamicScalerState())
    {'scale': 32768.0, 'skipped': 0, 'total_skipped': 0, 'total_redone': 0, 'underflow': 0.0}
    """
    _check_type("scaler_metrics", state)
    if any(isinstance(x, jax.core.Tracer) for x in state):
        raise TypeError(
            "scaler_metrics got a state that is being traced; expected one with values. Return the state from the "
            "jitted step, and call scaler_metrics on it outside jit."
        )
    # `pmap` returns one state for each device; take the first.
    numbers = {name: np.ravel(x)[0].item() for name, x in state._asdict().items() if x is not None}
    return {
        "scale": numbers["scaler"],
        "skipped": numbers["skipped"],
        "total_skipped": numbers["total_resets"] - numbers["total_redos"],  # overflows that were not retried
        "total_redone": numbers["total_redos"],
        "underflow": numbers["underflow"],
    }


# -- bad input


_POSITIVE = ("scaler", "backoff_factor", "hysteresis", "accumulate", "max_scaler", "adjust_factor")


_WHOLE = tuple(field for field, dtype in zip(DynamicScalerState._fields, _DTYPES, strict=True) if dtype == np.int32)
_LARGEST_COUNT = np.iinfo(np.int32).max


def check_state(name: str, state: Any) -> None:
    """Check the type of a state, and those of its values that are not traced."""
    _check_type(name, state)
    for field, value in state._asdict().items():
        if isinstance(value, jax.core.Tracer) or (value is None and field == "backoff_factor"):
            continue
        _check_number(name, field, value)
        number = float(value)
        positive = field in _POSITIVE
        if not 0 <= number < float("inf") or (positive and not number):
            expected = "a positive, finite number" if positive else "a finite number, 0 or more"
        elif field in _WHOLE and not (number.is_integer() and number <= _LARGEST_COUNT):
            expected = f"a whole number, at most {_LARGEST_COUNT}"
        elif field == "min_scaler" and not isinstance(top := state.max_scaler, jax.core.Tracer) and number > float(top):
            expected = f"at most max_scaler, which is {float(top):g}"
        elif (field == "adjust_factor" and number < 1) or (field == "backoff_factor" and number > 1):
            expected = "1 or more, to raise the scale" if number < 1 else "1 or less, to lower the scale"
        else:
            continue
        raise ValueError(
            f"{name} got a state with {field}={number:g}; expected {expected}. Leave it out for its default, "
            f"{field}={_default(field)}."
        )


def _check_number(name: str, field: str, value: Any) -> None:
    if np.ndim(value):
        raise TypeError(
            f"{name} got a state with {field} of shape {np.shape(value)}; expected a number. In pmap and vmap, call it "
            "on the state inside the mapped function, where each field is a scalar."
        )
    is_real = value is not None and jnp.issubdtype(np.asarray(value).dtype, np.number) and not np.iscomplexobj(value)
    if not is_real:
        raise TypeError(
            f"{name} got a state with {field}={value!r}; expected a number. Leave it out for its default, "
            f"{field}={_default(field)}."
        )


def _default(field: str) -> Any:
    value = DynamicScalerState._field_defaults[field]
    return None if value is None else value.item()


def _check_type(name: str, state: Any) -> None:
    if not isinstance(state, DynamicScalerState):
        raise TypeError(
            f"{name} got {state!r}, of type {type(state).__name__}, as a scaler's state; expected a DynamicScalerState."
            " Write dynamic_scaler_state=jaxamp.DynamicScalerState(), then pass the state that each step returns."
        )

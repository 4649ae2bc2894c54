"""The traits that a primitive can have, and where they are declared."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from .._compat import Primitive, jet_knows, jet_of, primitives
from .matmul_cost import Dims


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a primitive does, costs and looks like. All that is not said is false."""

    # -- dtypes
    fixed_dtype: bool = False  # the dtype is part of its meaning: no rule of ours recasts it
    moves: bool = False  # the result holds entries of the operands, their signs or their indices; nothing is rounded
    relays: bool = False  # the results are entries of the float operands, as they are: rounding may come first
    rearranges: bool = False  # likewise, on one device, and no entry is in many places, unless it is looked up there
    communicates: bool = False  # it sends entries of one operand from device to device
    sums_devices: bool = False  # it sums what several devices have
    keeps_all_entries: bool = False  # each entry of the operand is in the result, once
    keeps_range: bool = False  # a position, or a number beyond the compute dtype's range, comes out as one
    delivers: bool = (
        False  # its operands arrive in its result, rearranged, sent to other devices, or summed as gradients
    )
    returns_indices: bool = False  # integers among the results are places, not values of the operands
    makes_positions: bool = False  # its floats count places
    draws: bool = False  # random bits
    pairwise: bool = False  # result i comes from operand i alone
    writes_buffer: bool = False  # the first operand is a buffer that the others are written into

    # -- arithmetic
    matmul: bool = False  # bilinear in its first two operands: what a matrix unit does
    matrix_unit: bool = False  # a matmul, or something made of matmuls
    convolves: bool = False  # a matmul of windows
    nonlinear: bool = False  # of one entry; its derivative needs a value that it reads or makes
    derivative_of_result: bool = False  # nonlinear, and its derivative is read off its result
    transcendental: bool = False  # nonlinear, and not a few products: XLA does not compute it twice to save memory
    elementwise: bool = False  # each entry of the result is made of one entry of each operand
    broadcasts: bool = False  # operands of size one along an axis are repeated along it
    product: bool = False
    sum: bool = False
    compares: bool = False
    reduces: bool = False
    magnifies: bool = False  # a decomposition or a solve: it multiplies errors by a condition number
    passes_on: bool = False  # the result is the operand, perhaps in another dtype or layout: free, and not compared
    mask_arithmetic: bool = False  # element-wise, and masks of positions are built from it

    # -- bodies
    plain_call: bool = False  # its body runs once, in its place
    hands_out: bool = False  # each result is that of its body, or of one of its bodies
    own_jvp: bool = False  # a user's rule says what the forward derivative of its body is
    own_vjp: bool = False  # or the backward derivative
    checkpoints: bool = False  # a user decides here what is kept for the backward pass
    transparent: bool = False  # JAX differentiates its bodies, and keeps what their operations need

    # -- transforms
    jet: Callable[..., Any] | None = None  # its rule for `jax.experimental.jet`, as `_compat.jet_knows` takes it

    # -- what is kept or remembered
    cheap: bool = False  # one pass over operands that are read anyway: computed again, not kept
    plain_params: bool = False  # parameters are shapes, axes, dtypes and shardings, so that a cache may hold them
    kept: Callable[..., bool] | None = None  # (*avals, **params): whether our checkpoints keep it; None: if not cheap

    # -- what it costs, and how it is shown
    flops: Callable[[Any], int] | None = None  # of an equation; None: one for each entry
    dims: Callable[[Any], Dims] | None = None  # of an equation that is one matmul
    shown_as: str | None = None  # the name in reports and comparisons; None: its own
    multiplies_in: Callable[[dict[str, Any]], Any] | None = None  # the dtype that operands are rounded to inside
    in_tables: bool = False  # policy tables may name it, as they name JAX's primitives
    policy_key: Primitive | None = None  # the primitive whose rule it follows; None: itself
    takes_part: Callable[[dict[str, Any]], tuple[list[bool], list[bool]]] | None = None  # see `attention.py`

    def with_implied(self) -> "Traits":
        """These traits, with those that follow from them."""
        elementwise = self.elementwise or self.nonlinear
        cheap = self.cheap or elementwise or self.reduces or self.compares
        return dataclasses.replace(
            self,
            elementwise=elementwise,
            cheap=cheap,
            keeps_range=self.keeps_range or self.moves,
            matrix_unit=self.matrix_unit or self.matmul,
            plain_params=self.plain_params or cheap or self.compares or self.matmul,
        )


NONE = Traits()
OF_JAX: dict[str, Traits] = {}  # by name: JAX exports only some of its primitives. `jax_table.py` fills it.
_DECLARED: dict[Primitive, Traits] = {}
_FOUND: dict[Primitive, Traits] = {}  # what `traits_of` has said


def declare(primitive: Primitive, traits: Traits) -> None:
    """Say what is true of a primitive that is not JAX's, next to its definition."""
    _DECLARED[primitive] = _FOUND[primitive] = traits.with_implied()
    if traits.jet is not None:
        jet_knows(primitive, traits.jet)


def teach_jet() -> None:
    """Let `jax.experimental.jet`, if it is imported, go through our primitives and the checkpoints that we set."""
    for primitive, traits in _DECLARED.items():
        if traits.jet is not None:
            jet_knows(primitive, traits.jet)
    checkpointed = jet_of(lambda *operands, jaxpr, **params: jax.core.eval_jaxpr(jaxpr, (), *operands))
    jet_knows(primitives()["remat2"], checkpointed)


def declared(name: str) -> Primitive | None:
    """The primitive of ours that a policy table means by this name."""
    return next((p for p, traits in _DECLARED.items() if traits.in_tables and p.name == name), None)


def traits_of(primitive: Primitive) -> Traits:
    """What is known of a primitive; an unknown one has no traits."""
    found = _FOUND.get(primitive)
    if found is None:
        found = _FOUND[primitive] = OF_JAX.get(primitive.name, NONE)
    return found


def shown_name(primitive: Primitive) -> str:
    """The name of a primitive in reports and comparisons."""
    return traits_of(primitive).shown_as or primitive.name

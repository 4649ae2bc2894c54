"""A value that our checkpoints keep."""

import functools

from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive, jet_of
from .._traits import Traits, declare

KEPT = Primitive("kept")

KEPT.def_impl(functools.partial(xla.apply_primitive, KEPT))
KEPT.def_abstract_eval(lambda x: x)
mlir.register_lowering(KEPT, lambda ctx, x: [x])
ad.deflinear2(KEPT, lambda ct, x: [ct])
ad.primitive_jvps[KEPT] = lambda primals, tangents: (KEPT.bind(*primals), tangents[0])
batching.defvectorized(KEPT)
declare(KEPT, Traits(elementwise=True, passes_on=True, kept=lambda *avals: True, jet=jet_of(lambda x: x)))

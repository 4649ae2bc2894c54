"""What is true of a primitive under every policy.

A policy says how precise an operation should be. A trait says what the operation does to its operands, what it costs
and how it is shown, so that the transform and the tools need not know any primitive by name.

- `traits.py`: the traits there are, and `declare`, which each primitive of ours calls where it is defined
- `jax_table.py`: the traits of JAX's primitives, in one table
- `matmul_cost.py`: the dimensions and FLOPs of matmuls and convolutions
"""

from . import jax_table as jax_table
from .traits import Traits as Traits
from .traits import declare as declare
from .traits import declared as declared
from .traits import shown_name as shown_name
from .traits import teach_jet as teach_jet
from .traits import traits_of as traits_of

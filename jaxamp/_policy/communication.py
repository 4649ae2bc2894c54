"""What a policy says of values that go from device to device.

    policy = load_policy("default") | {COMMUNICATION: Communication(reduce="compute")}
    policy |= {("head", COMMUNICATION): Communication(gather="float32")}     # in the scope "head"

As with rules, the outermost scope that has an entry wins.
"""

import dataclasses
from typing import Literal, get_args

from .._compat import Primitive
from .._errors import nearest

COMMUNICATION = Primitive("communication")  # the key of a policy, in the place of a primitive; nothing binds it

Gather = Literal["compute", "float32"]
Reduce = Literal["float32", "compute", "wire"]


@dataclasses.dataclass(frozen=True)
class Communication:
    """The dtypes in which values are sent from device to device.

    Attributes:
        gather: In which dtype parameters are gathered that only matmuls read. `"compute"`: in the compute dtype.
            `"float32"`: as they are.
        reduce: How gradients of parameters are summed over devices; they are float32 in any case. `"float32"`: in
            float32. `"compute"`: in the compute dtype, for half of the bytes and with its rounding; where XLA makes the
            sum, it makes one for each matmul that reads the parameter. `"wire"`: sent in the compute dtype and summed
            in float32, in a `shard_map`; elsewhere XLA makes the sum. The last two are also for the sums that a
            program makes itself, with `psum` or `psum_scatter`, of what matmuls made.

    >>> Communication(reduce="compute")
    Communication(gather='compute', reduce='compute')
    """

    gather: Gather = "compute"
    reduce: Reduce = "float32"

    def __post_init__(self) -> None:
        for name, words in FIELDS.items():
            given = getattr(self, name)
            if not isinstance(given, str) or given not in words:
                raise ValueError(
                    f"Communication got {name}={given!r}; expected {' or '.join(map(repr, words))}."
                    + (nearest(str(given), words) or f" Write Communication({name}={words[0]!r}).")
                )


FIELDS: dict[str, tuple[str, ...]] = {"gather": get_args(Gather), "reduce": get_args(Reduce)}

"""Compressed optimizers: weights of 24 bits and moments of 8, in plain XLA."""

from ._bytes import Bytes as Bytes
from ._bytes import optimizer_bytes as optimizer_bytes
from ._checkpoint import from_arrays as from_arrays
from ._checkpoint import to_arrays as to_arrays
from ._codecs import Momentum as Momentum
from ._codecs import Variance as Variance
from ._flash import flash_adam as flash_adam
from ._flash import flash_adamw as flash_adamw
from ._flash import flash_lion as flash_lion
from ._flash import flash_sgd as flash_sgd
from ._flash import flash_sgdw as flash_sgdw
from ._float32 import Float32 as Float32
from ._float32 import float32_weights as float32_weights
from ._float32 import from_float32 as from_float32
from ._float32 import to_float32 as to_float32
from ._float32 import to_layout as to_layout
from ._optimizer import FlashOptimizer as FlashOptimizer
from ._optimizer import FlashState as FlashState
from ._sharding import state_shardings as state_shardings
from ._storage import Storage as Storage
from ._weights import Weight as Weight
from ._wrappers import Compressed as Compressed
from ._wrappers import CompressedState as CompressedState
from ._wrappers import MasterState as MasterState
from ._wrappers import compress_state as compress_state
from ._wrappers import with_master_weights as with_master_weights

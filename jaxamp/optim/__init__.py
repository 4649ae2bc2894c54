"""Compressed optimizers: weights of 24 bits and moments of 8, in plain XLA."""

from ._codecs import Momentum as Momentum
from ._codecs import Variance as Variance
from ._flash import flash_adam as flash_adam
from ._flash import flash_adamw as flash_adamw
from ._flash import flash_lion as flash_lion
from ._flash import flash_sgd as flash_sgd
from ._flash import flash_sgdw as flash_sgdw
from ._float32 import float32_weights as float32_weights
from ._optimizer import FlashOptimizer as FlashOptimizer
from ._optimizer import FlashState as FlashState
from ._storage import Storage as Storage
from ._weights import Weight as Weight

"""Attention with QK-norm for Flax nnx."""

from ._nnx import QKNormAttention as QKNormAttention
from ._nnx import RMSNorm as RMSNorm
from ._rope import apply_rope as apply_rope

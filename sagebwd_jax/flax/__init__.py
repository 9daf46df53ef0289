"""Attention with QK-norm for Flax nnx, and the function that Flax's own modules take as their attention_fn.

Give those modules `attention_fn`, never `attention`, with which linen drops dropout silently and nnx raises TypeError.
"""

from ._adapters import attention_fn as attention_fn
from ._nnx import QKNormAttention as QKNormAttention
from ._nnx import RMSNorm as RMSNorm
from ._rope import apply_rope as apply_rope

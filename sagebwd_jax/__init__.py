"""Trainable INT8 attention for JAX."""

from sagebwd_jax._attention import attention as attention
from sagebwd_jax._config import SageConfig as SageConfig
from sagebwd_jax._residuals import RESIDUAL_NAMES as RESIDUAL_NAMES
from sagebwd_jax._ring import ring_attention as ring_attention

"""Rotary position embedding (Su et al., arXiv 2104.09864), in the half-split pairing of Llama and GPT-NeoX."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def apply_rope(
    x: Float[Array, "B T N H"], positions: Int[Array, "#B T"] | None = None, *, theta: float = 10_000.0
) -> Float[Array, "B T N H"]:
    """Turns channel i against channel i + H/2 by the angle position * theta^(-2i/H).

    The product of a turned query and a turned key depends on their distance alone. Angles and products are float32,
    for a bfloat16 angle is off by up to 8 radians near position 4000. The result has x's dtype.

    Args:
      x: queries or keys; H is even.
      positions: of every token; None counts from 0.
      theta: longest wavelength divided by 2 pi, in tokens.

    Raises:
      ValueError: H is odd.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"{head_dim=} must be even: RoPE turns channels in pairs")
    if positions is None:
        positions = jnp.arange(x.shape[1])[None]
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)
    sin = jnp.stack([-sin, sin], axis=-2)  # [B, T, 1, 2, H/2]
    # Halves that are split and joined would each be written to memory; a reversed axis is only read in another order.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, head_dim // 2)
    return (halves * cos + halves[..., ::-1, :] * sin).reshape(x.shape).astype(x.dtype)

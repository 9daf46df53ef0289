"""SwiGLU: the feed-forward layer, whose gate and up are one product, and whose gradients are one pass over both.

May be changed: how the two halves lie in memory. Their pairs of 16-bit numbers are read and written as one word, since
XLA makes two passes of what writes two halves apart, each of which reads all that both need.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class SwiGLU(nnx.Module):
    """(silu(x Wgate) * (x Wup)) Wdown (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, ffn_width: int, *, out_init: nnx.Initializer, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(use_bias=False, dtype=dtype, rngs=rngs)
        self.dtype = dtype
        self.gate = nnx.Linear(width, ffn_width, **options)
        self.up = nnx.Linear(width, ffn_width, **options)
        self.down = nnx.Linear(ffn_width, width, kernel_init=out_init, **options)

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Applies the layer to every token."""
        # One product for both, with one pass over what its gradients read. In pairs, channels stay on their devices.
        kernels = [layer.kernel[...].astype(self.dtype) for layer in (self.gate, self.up)]
        return self.down(gated(jnp.einsum("btw,wfg->btfg", x.astype(self.dtype), jnp.stack(kernels, axis=-1))))


@jax.custom_vjp
def gated(pairs: Float[Array, "*B F 2"]) -> Float[Array, "*B F"]:
    """silu(gate) * up of pairs (gate, up), computed in float32 and rounded once."""
    return _forward(pairs)[0]


def _forward(pairs: Any) -> tuple[Any, Any]:
    """Nothing but the pairs is kept."""
    gate, up = (x.astype(jnp.float32) for x in _apart(pairs))
    return (jax.nn.silu(gate) * up).astype(pairs.dtype), pairs


def _backward(pairs: Any, dout: Any) -> tuple[Any]:
    """d silu(x) / dx = s + x s (1 - s) with s = sigmoid(x)."""
    gate, up, dout = (x.astype(jnp.float32) for x in (*_apart(pairs), dout))
    sigmoid = jax.nn.sigmoid(gate)
    dgate = dout * up * sigmoid * (1 + gate * (1 - sigmoid))
    return (_together(*(x.astype(pairs.dtype) for x in (dgate, dout * gate * sigmoid))),)


gated.defvjp(_forward, _backward)


def _apart(pairs: Any) -> tuple[Any, Any]:
    """Both halves of [*B, F, 2]."""
    if pairs.dtype.itemsize != 2:
        return pairs[..., 0], pairs[..., 1]
    words = jax.lax.bitcast_convert_type(pairs, jnp.uint32)
    first, second = (x.astype(jnp.uint16) for x in (words & 0xFFFF, words >> 16))
    return jax.lax.bitcast_convert_type(first, pairs.dtype), jax.lax.bitcast_convert_type(second, pairs.dtype)


def _together(first: Any, second: Any) -> Any:
    """The inverse of `_apart`."""
    if first.dtype.itemsize != 2:
        return jnp.stack((first, second), axis=-1)
    low, high = (jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (first, second))
    return jax.lax.bitcast_convert_type(low | high << 16, first.dtype)

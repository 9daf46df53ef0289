"""attention(): checks its arguments once, brings them to canonical form, and calls the core."""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import launch, steps
from sagebwd_jax import _masks, _segments, _sharding
from sagebwd_jax._config import LENGTH_MULTIPLE, CallSpec, SageConfig
from sagebwd_jax._vjp import attention_core, masked_attention_core, mean_logits

DTYPES = ("bfloat16", "float16", "float32")
IMPLEMENTATIONS = ("triton", "xla")
MAX_HEAD_DIM = 256


def attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K H"],
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    config: SageConfig | None = None,
) -> Array | tuple[Array, Array]:
    """softmax(scale Q K^T + bias) V, trainable, with six of its seven products in INT8: `jax.nn`'s signature.

    O = softmax(scale Q (K - mean K)^T) V forward; dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = scale dS K,
    dK = scale dS^T Q, dV = P^T dO backward (SageBwd, arXiv 2603.02170, sections 3 and 6). All but dP run in INT8
    unless `config` says otherwise; softmax, scales, dP, dS and the sums are float32. Results are bitwise repeatable and
    do not depend on the rest of the batch.

    Args:
      query: [B, T, N, H] or [T, N, H]; bfloat16, float16 or float32, as `key` and `value`.
      key: [B, S, K, H] or [S, K, H]; N must be a multiple of K (grouped-query attention).
      value: as `key`.
      bias: bfloat16, float16 or float32, added to the scaled logits; any shape that broadcasts to [B, N, T, S]. A value
        at or below -1e20, or float16's least, hides the key as a mask would. Its gradient is made only where it is
        asked for, and costs the float32 scores [B, N, T, S] ("triton").
      mask: boolean, False hides a key from a query; any shape that broadcasts to [B, N, T, S].
      scale: of the logits, a real number; 1/sqrt(H) if None. An array of one element is multiplied into `query` first.
      is_causal: query i sees keys 0..i, also where T and S differ (top-left, as in `jax.nn`): do not use it to decode
        one token against a cache.
      query_seq_lengths, key_value_seq_lengths: integers [B]; tokens from there on are padding, whatever they hold.
      local_window_size: (left, right), or an int for both: query i sees keys i-left..i+right.
      query_segment_ids, key_value_segment_ids: integers [B, T] and [B, S], any: a query sees the keys of its segment
        (packed documents). Where T = S, query_segment_ids alone stands for both.
      implementation: "triton" (Pallas kernels, NVIDIA GPU of compute capability 8.0 or higher), "xla" (the same
        algorithm in plain JAX, anywhere), or None: the kernels where they run. An explicit choice never falls back.
      return_residual: also return the log-sum-exp of the scaled logits.
      config: the precision of each product and the granularity of the scales.

    Returns:
      The output in the shape and dtype of `query`, and with `return_residual` the log-sum-exp [B, T, N], float32,
      natural, -inf where a query sees no key. Forward-mode differentiation is not supported (a `jax.custom_vjp`).

    Raises:
      ValueError: shapes, mixed dtypes, a negative window, segment ids of one side alone, an unknown implementation.
      TypeError: a dtype that is not accepted, a window that is not of ints, a scale that is no real number, a flag that
        is no bool, or a config that is not a SageConfig.
      NotImplementedError: an argument or size that is not supported yet, or "triton" without a GPU for it.

    Differs from the paper in the default scales, which are finer, and in delta = rowsum(dO O), for which O is not
    rounded to 16 bits, and smooths packed documents by their own means; differs from `jax.nn` where a query sees no
    key: output and gradients are 0. docs/arguments.md says what each argument costs.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check_dtypes(query, key, value)
    _check_shapes(query, key, value)
    scale = _check_scale(scale)
    is_causal, return_residual = _check_flag("is_causal", is_causal), _check_flag("return_residual", return_residual)
    implementation = _choose_implementation(implementation)
    config = SageConfig() if config is None else config
    if not isinstance(config, SageConfig):
        raise TypeError(f"config={config!r} is a {type(config).__name__}: a SageConfig is accepted")

    batched = query.ndim == 4
    if not batched:
        query, key, value = query[None], key[None], value[None]
    batch, queries, heads, depth = query.shape
    window, visibility = _masks.canonical(
        _masks.Sizes(batch=batch, queries=queries, keys=key.shape[1], heads=heads, batched=batched),
        bias=bias,
        mask=mask,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
    )
    packed = query_segment_ids is not None
    spec = CallSpec(
        is_causal=is_causal,
        scale=1.0,
        query_length=queries,
        key_length=key.shape[1],
        implementation=implementation,
        differentiates_lse=return_residual,
        config=config.for_documents().at_depth(depth) if packed else config.at_depth(depth),
        window=window,
        packed=packed,
    )
    out, lse = _attend(query, key, value, scale, visibility, spec)
    if not batched:
        out, lse = out[0], None if lse is None else lse[0]
    return out if lse is None else (out, lse)


def _attend(query, key, value, scale, visibility, spec):
    """Pad to canonical form, call the core, and cut off the padding; no log-sum-exp where none is wanted."""
    batch, queries, heads, depth = query.shape
    keys = key.shape[1]
    if query.size == 0 or keys == 0:
        lse = jnp.full((batch, queries, heads), -jnp.inf, jnp.float32) if spec.differentiates_lse else None
        return jnp.zeros_like(query), lse
    query, scale = _apply_scale(query, scale)
    spec = dataclasses.replace(spec, scale=scale)
    query, key, value = (_pad(x) for x in _sharding.align(query, key, value))
    sees_nothing = None
    if visibility is None:
        out, lse = attention_core(query, key, value, spec)
    else:
        query, key, value, visibility = _sharding.vary_alike(query, key, value, visibility)
        if visibility.query_segments is not None:
            query = _segments.clear_padding(query, visibility.query_segments)
            key, value = (_segments.clear_padding(x, visibility.key_segments) for x in (key, value))
        out, lse = masked_attention_core(query, key, value, visibility, spec)
        sees_nothing = lse >= steps.NO_QUERY / 2
        # They are 0 already; this keeps cotangents of such rows, NaN at times, out of the backward pass.
        out = jnp.where(sees_nothing.swapaxes(1, 2)[..., None], jnp.zeros((), out.dtype), out)
    out = out[:, :queries, :, :depth]
    if not spec.differentiates_lse:
        return out, None
    lse = lse / steps.LOG2_E
    if spec.config.smooth_k:
        # Smoothing took this from INT8 logits; 16-bit logits kept it, but dQ is made from smoothed keys all the same.
        taken = mean_logits(query, key, visibility, spec)
        lse = lse + (taken if spec.uses_int8("qk") else taken - jax.lax.stop_gradient(taken))
    lse = lse.swapaxes(1, 2)[:, :queries]
    if sees_nothing is not None:
        lse = _no_lse_where(sees_nothing.swapaxes(1, 2)[:, :queries], lse)
    return out, lse


@jax.jit
def _no_lse_where(sees_nothing, lse):
    """-inf there. Compiled, as `jax.debug_infs` finds the constant itself where each operation runs by itself."""
    return jnp.where(sees_nothing, -jnp.inf, lse)


def padded_depth(depth: int) -> int:
    """The head dim that a head dim has inside: a power of two of channels that a tensor core takes."""
    return max(32, 1 << (depth - 1).bit_length())


def _pad(x):
    """Zeros up to whole tiles of time and up to `padded_depth` channels."""
    widths = [(0, 0), (0, -x.shape[1] % LENGTH_MULTIPLE), (0, 0), (0, padded_depth(x.shape[3]) - x.shape[3])]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _check_dtypes(query, key, value):
    """All three alike, and one of DTYPES."""
    named = dict(query=query, key=key, value=value)
    for name, x in named.items():
        if x.dtype.name not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype.name}: accepted are {', '.join(DTYPES)}")
    if len({x.dtype for x in named.values()}) > 1:
        got = ", ".join(f"{name} {x.dtype.name}" for name, x in named.items())
        raise ValueError(f"query, key and value must have one dtype: got {got}")


def _check_shapes(query, key, value):
    """Ranks, and the axes that must agree."""
    for name, x in dict(query=query, key=key, value=value).items():
        if x.ndim not in (3, 4) or x.ndim != query.ndim:
            accepted = "[B, T, N, H] or [T, N, H]" if name == "query" else "[B, S, K, H] or [S, K, H], as query's rank"
            raise ValueError(f"{name} has shape {x.shape}: accepted is {accepted}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have one shape: got key {key.shape} and value {value.shape}")
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"query and key must have one batch size: got query {query.shape} and key {key.shape}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have one head dim: got query {query.shape} and key {key.shape}")
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query's heads must be a multiple of key's: got {heads} and {kv_heads}")
    if not 1 <= query.shape[-1] <= MAX_HEAD_DIM:
        raise NotImplementedError(f"head dim {query.shape[-1]}: accepted are 1 to {MAX_HEAD_DIM}")


def _check_scale(scale):
    """None, a float, or a float32 array without axes."""
    if scale is None:
        return None
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        return float(scale)
    accepted = "accepted is a real number, also in an array of one element"
    try:
        # These would become arrays, or warn.
        array = None if isinstance(scale, bool | complex | str | bytes) else jnp.asarray(scale)
    except (TypeError, ValueError):
        array = None
    if array is None:
        raise TypeError(f"scale={scale!r} is a {type(scale).__name__}: {accepted}")
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"scale has dtype {array.dtype.name}: {accepted}")
    if array.size != 1:
        raise ValueError(f"scale has shape {array.shape}: {accepted}")
    return array.reshape(()).astype(jnp.float32)


def _apply_scale(query, scale):
    """The query and the number that is left to multiply the logits by: an array goes into the query."""
    if scale is None or isinstance(scale, float):
        return query, query.shape[-1] ** -0.5 if scale is None else scale
    return (query.astype(jnp.float32) * scale).astype(query.dtype), 1.0


def _check_flag(name, flag):
    """A bool."""
    if not isinstance(flag, bool | np.bool):
        raise TypeError(
            f"{name}={flag!r} is a {type(flag).__name__}: accepted is a bool, known when the call is traced"
        )
    return bool(flag)


def _choose_implementation(implementation):
    """A known name and a device that can run it; None where the platform that it is lowered for decides."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r}: accepted are None, {', '.join(map(repr, IMPLEMENTATIONS))}"
        )
    if implementation == "triton":
        launch.check_target()
    capability = launch.target_capability()
    if implementation is None and capability is not None and capability < launch.MIN_CAPABILITY:
        return "xla"
    return implementation

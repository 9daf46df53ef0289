"""Ring attention: the sequence is sharded over devices, and keys and values travel around them."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from sagebwd_jax import _attention, _quantize, _sharding, _vjp
from sagebwd_jax._config import CallSpec, SageConfig


def ring_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K H"],
    *,
    axis_name: str,
    scale: float | Array | None = None,
    is_causal: bool = False,
    implementation: str | None = None,
    config: SageConfig | None = None,
) -> Array:
    """`attention` over a sequence of which each device holds one part; for use inside of `jax.shard_map`.

    Device i holds tokens i T .. (i+1) T - 1 of the queries and i S .. (i+1) S - 1 of the keys. Each part of K and V
    goes once around the ring; the parts' results are joined by their log-sum-exps: O = sum_j 2^(L_j - L) O_j with
    L = log2 sum_j 2^(L_j) (Liu et al., arXiv 2310.01889). The backward pass sends K, V, dK and dV around once more and
    makes P from the joined L. What a device holds does not grow with the number of devices, forward or backward.

    Args:
      query: [B, T, N, H] or [T, N, H], this device's part; dtypes as in `attention`.
      key: [B, S, K, H] or [S, K, H], this device's part; N must be a multiple of K.
      value: as `key`.
      axis_name: the mesh axis, of the `shard_map` around, over which the sequence is sharded.
      scale, implementation, config: as in `attention`.
      is_causal: token i of the whole sequence sees tokens 0..i. Parts of the future are skipped, so the last device
        works longest; T and S must be equal.

    Returns:
      This device's part of the output, in the shape and dtype of `query`.

    Raises:
      ValueError: as `attention`; `axis_name` is not an axis here; causal parts of unequal lengths.
      TypeError, NotImplementedError: as `attention`.

    The numbers are those of one device up to quantisation: K's mean is that of the whole sequence, but V's scales are
    each part's own, and partial gradients are rounded to the dtype of the inputs before they are added in float32.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _attention._check_dtypes(query, key, value)
    _attention._check_shapes(query, key, value)
    scale = _attention._check_scale(scale)
    is_causal = _attention._check_flag("is_causal", is_causal)
    implementation = _attention._choose_implementation(implementation)
    config = SageConfig() if config is None else config
    if not isinstance(config, SageConfig):
        raise TypeError(f"config={config!r} is a {type(config).__name__}: a SageConfig is accepted")
    queries, keys, depth = query.shape[-3], key.shape[-3], query.shape[-1]
    if is_causal and queries != keys:
        raise ValueError(
            f"query and key must have parts of one length if is_causal: got query {query.shape} and key {key.shape}"
        )
    try:
        lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"{axis_name=} is not an axis here: call ring_attention inside of a jax.shard_map over it"
        ) from error
    if query.size == 0 or keys == 0:
        return jnp.zeros_like(query)
    query, factor = _attention._apply_scale(query, scale)
    spec = CallSpec(
        is_causal=is_causal,
        scale=factor,
        query_length=queries,
        key_length=keys,
        implementation=implementation,
        differentiates_lse=False,
        config=config.at_depth(depth),
    )
    operands = (query, key, value) if query.ndim == 4 else (query[None], key[None], value[None])
    operands = _sharding.vary_alike(*map(_attention._pad, operands))
    out = _ring(*operands, spec, axis_name)[:, :queries, :, :depth]
    return out if query.ndim == 4 else out[0]


def _primal(query, key, value, spec, axis_name):
    """O [B, T, N, H] of this device's queries, in canonical form."""
    return _forward(query, key, value, spec, axis_name)[0]


def _forward(query, key, value, spec, axis_name):
    """O, and what the backward pass needs: the inputs, K's mean, O in int16 and the log-sum-exp over all parts."""
    mean = None
    if spec.config.smooth_k:
        # One mean for all parts: a part's own would cancel only within it, from its logits and from its dQ.
        mean = lax.pmean(_vjp._run("mean_logits", spec, query, key)[1], axis_name)

    def part(key, value, spec):
        _, lse, r = _vjp._run("forward", spec, query, key, value, None, mean, keep=True)
        # Kept with more bits than the output.
        return r.out_int16.astype(jnp.float32) * r.out_scale.swapaxes(1, 2)[..., None], lse

    def add(state, key, value):
        return _join(state, part(key, value, dataclasses.replace(spec, is_causal=False)))

    def step(carry, distance):
        state, key, value = carry
        following = _pass_on((key, value), axis_name)
        return (_if_seen(add, state, key, value, distance, spec, axis_name), *following), None

    following = _pass_on((key, value), axis_name)
    (out, lse), *_ = _scan(step, (part(key, value, spec), *following), axis_name)
    out_int16, out_scale = _quantize.round_to_int16_rows(out)
    kept = dict(query=query, key=key, value=value, out=(out_int16, out_scale.swapaxes(1, 2)), lse=lse)
    kept = {
        name: jax.tree.map(lambda x, name=name: checkpoint_name(x, f"sagebwd_{name}"), x) for name, x in kept.items()
    }
    return checkpoint_name(out.astype(query.dtype), "sagebwd_out"), kept | dict(mean=mean)


def _backward(spec, axis_name, kept, dout):
    """dQ, dK and dV of this device's parts."""
    out_int16, out_scale = kept["out"]

    def part(key, value, spec):
        _, _, r = _vjp._run("forward", spec, kept["query"], key, value, None, kept["mean"], keep=True)
        # Of what it makes only the quantised Q and K are read, so the compiler leaves the kernel itself out.
        residuals = dataclasses.replace(r, out_int16=out_int16, out_scale=out_scale, lse=kept["lse"])
        return tuple(x.astype(jnp.float32) for x in _vjp._run("backward", spec, residuals, dout, None))

    def add(grads, key, value):
        new = part(key, value, dataclasses.replace(spec, is_causal=False))
        return tuple(map(jnp.add, grads, new))

    def step(carry, distance):
        (dq, *dkv), key, value = carry
        following = _pass_on((key, value), axis_name)
        # dK and dV travel with their part.
        grads = dq, *_pass_on(dkv, axis_name)
        return (_if_seen(add, grads, key, value, distance, spec, axis_name), *following), None

    key, value = kept["key"], kept["value"]
    following = _pass_on((key, value), axis_name)
    (dq, *dkv), *_ = _scan(step, (part(key, value, spec), *following), axis_name)
    return tuple(x.astype(dout.dtype) for x in (dq, *_pass_on(dkv, axis_name)))


_ring_vjp = jax.custom_vjp(_primal, nondiff_argnums=(3, 4))
_ring_vjp.defvjp(_forward, _backward)
_ring: Callable[..., jax.Array] = _ring_vjp


def _join(state, new_state):
    """O [B, T, N, H] and log-sum-exp in base 2 [B, N, T] over two sets of keys from those over each."""
    (out, lse), (new_out, new_lse) = state, new_state
    joined = jnp.logaddexp2(lse, new_lse)

    def weigh(out, lse):
        return out * jnp.exp2(lse - joined).swapaxes(1, 2)[..., None]

    return weigh(out, lse) + weigh(new_out, new_lse), joined


def _if_seen(add, state, key, value, distance, spec, axis_name):
    """`add` of a part that comes from `distance` devices before this one, unless it lies in the future."""
    if not spec.is_causal:
        return add(state, key, value)
    is_seen = distance <= lax.axis_index(axis_name)
    return lax.cond(is_seen, add, lambda state, *_: state, state, key, value)


def _pass_on(arrays, axis_name):
    """What the device before this one holds."""
    size = lax.axis_size(axis_name)
    return lax.ppermute(arrays, axis_name, [(i, (i + 1) % size) for i in range(size)])


def _scan(step, carry, axis_name):
    """The carry after every part but this device's own."""
    return lax.scan(step, carry, jnp.arange(1, lax.axis_size(axis_name)))[0]

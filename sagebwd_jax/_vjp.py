"""The custom_vjps: which implementation runs each pass, and what the forward pass keeps for the backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import launch
from sagebwd_jax import _sharding
from sagebwd_jax._config import CallSpec


def _run(function: str, spec: CallSpec, *operands, **static) -> Any:
    """A function of the implementation that the call asks for, or else of the one that suits where it is lowered."""
    return _run_once(operands, function, spec, tuple(static.items()), launch.is_interpreted())


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _run_once(operands, *static):
    """A custom_vjp, so that nobody differentiates a pass, through its rounding, whose slope is 0."""
    return _run_compiled(operands, *static)


def _refuse_derivatives(*_):
    raise NotImplementedError(
        "second derivatives of sagebwd_jax.attention are not supported: use jax.nn.dot_product_attention for them"
    )


_run_once.defvjp(_refuse_derivatives, _refuse_derivatives)


# Compiled once for equal shapes, also outside of a user's jit. `interpreted` changes what is traced, so it is a key.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _run_compiled(operands, function, spec, static, interpreted):
    # Here, since they read the config, whose package imports this module.
    from pallas_kernels import attention as triton
    from sagebwd_jax import _xla as xla

    del interpreted
    choices = dict(triton=getattr(triton, function), xla=getattr(xla, function))
    choices = {name: functools.partial(f, spec=spec, **dict(static)) for name, f in choices.items()}
    kernels = _sharding.partitioned(choices["triton"], function)

    def run(*operands):
        if spec.implementation is not None:
            return choices["xla"](*operands) if spec.implementation == "xla" else kernels(*operands)
        return lax.platform_dependent(*operands, cuda=kernels, default=choices["xla"])

    return _sharding.over_mesh(run, function)(*operands)


def _core(query, key, value, spec: CallSpec):
    """O [B, T, N, H] and its log-sum-exp in base 2 [B, N, T], of inputs in canonical form."""
    out, lse, _ = _run("forward", spec, query, key, value, keep=False)
    return out, lse


def _forward(query, key, value, spec):
    out, lse, residuals = _run("forward", spec, query, key, value, keep=True)
    # O is named too: a policy that saves the residuals but not O would run the forward kernel again for it.
    residuals = residuals.named()
    return (checkpoint_name(out, "sagebwd_out"), residuals.lse), residuals


def _backward(spec, residuals, cotangents):
    dout, dlse = cotangents
    return _run("backward", spec, residuals, dout, dlse if spec.differentiates_lse else None)


attention_core = jax.custom_vjp(_core, nondiff_argnames=("spec",))
attention_core.defvjp(_forward, _backward)


def _mean_logits(query, key, spec: CallSpec):
    """What smoothing takes from the logits of inputs in canonical form: scale * q . mean(k) [B, N, T].

    K's mean counts as a constant: the core's gradient of K is that of K itself.
    """
    return _run("mean_logits", spec, query, key)[0]


def _mean_logits_forward(query, key, spec):
    logits, mean = _run("mean_logits", spec, query, key)
    # The empty array says in which dtype the gradient is wanted.
    return logits, (jnp.zeros((0, query.shape[2] // key.shape[2]), query.dtype), mean)


def _mean_logits_backward(spec, residuals, dlogits):
    like, mean = residuals
    dquery = spec.scale * dlogits.swapaxes(1, 2)[..., None] * jnp.repeat(mean, like.shape[1], axis=1)[:, None]
    return dquery.astype(like.dtype), None


_mean_logits_vjp = jax.custom_vjp(_mean_logits, nondiff_argnames=("spec",))
_mean_logits_vjp.defvjp(_mean_logits_forward, _mean_logits_backward)
mean_logits: Callable[[jax.Array, jax.Array, CallSpec], jax.Array] = _mean_logits_vjp

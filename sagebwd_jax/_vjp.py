"""The custom_vjp: which implementation runs each pass, and what the forward pass keeps for the backward pass."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sagebwd_jax._config import CallSpec


def _run(function: str, spec: CallSpec, *operands, **static):
    """`forward` or `backward` of the implementation that the call asks for, or that suits where it is lowered."""
    from pallas_kernels import attention as triton
    from sagebwd_jax import _xla as xla

    choices = dict(triton=getattr(triton, function), xla=getattr(xla, function))
    choices = {name: functools.partial(f, spec=spec, **static) for name, f in choices.items()}
    if spec.implementation is not None:
        return choices[spec.implementation](*operands)
    return lax.platform_dependent(*operands, cuda=choices["triton"], default=choices["xla"])


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

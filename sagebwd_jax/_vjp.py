"""The custom_vjps: which implementation runs each pass, and what the forward pass keeps for the backward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_kernels import launch
from sagebwd_jax import _sharding
from sagebwd_jax._config import CallSpec
from sagebwd_jax._masks import Visibility
from sagebwd_jax._residuals import Residuals


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
    return _gradients(spec, residuals, dout, dlse if spec.differentiates_lse else None)


def _gradients(spec, residuals, dout, dlse, *visibility, **static):
    """dQ, dK and dV, and dbias where it is wanted."""
    if spec.key_length > 1:
        return _run("backward", spec, residuals, dout, dlse, *visibility, **static)
    # The softmax of one key is 1 whatever its score, so O's cotangent reaches V alone: dP less delta would leave
    # rounding. Times 0, so that what is not finite stays so.
    _, _, dv, *_ = _run("backward", spec, residuals, dout, None, *visibility)
    dq, dk, _, *dbias = _run("backward", spec, residuals, 0.0 * dout, dlse, *visibility, **static)
    return dq, dk, dv, *dbias


attention_core = jax.custom_vjp(_core, nondiff_argnames=("spec",))
attention_core.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _MaskedResiduals:
    """What a call with masks or a bias keeps, and whether its backward pass must make the bias's gradient."""

    residuals: Residuals
    visibility: Visibility
    want_dbias: bool = dataclasses.field(metadata=dict(static=True))


def _masked_core(query, key, value, visibility: Visibility, spec: CallSpec):
    """The same with masks and a bias; a query that sees no key has O = 0 and NO_QUERY."""
    out, lse, _ = _run("forward", spec, query, key, value, visibility, keep=False)
    return out, lse


def _masked_forward(query, key, value, visibility, spec):
    # Here an input comes with whether it is differentiated, as dbias is worth making only then.
    want_dbias = visibility.bias is not None and visibility.bias.perturbed
    operands = jax.tree.map(
        lambda x: x.value, (query, key, value, visibility), is_leaf=lambda x: hasattr(x, "perturbed")
    )
    out, lse, residuals = _run("forward", spec, *operands, keep=True)
    residuals = residuals.named()
    return (checkpoint_name(out, "sagebwd_out"), residuals.lse), _MaskedResiduals(residuals, operands[3], want_dbias)


def _masked_backward(spec, kept, cotangents):
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, str(dout.dtype))
    if isinstance(dlse, SymbolicZero) or not spec.differentiates_lse:
        dlse = None
    grads = _gradients(spec, kept.residuals, dout, dlse, kept.visibility, want_dbias=kept.want_dbias)
    if not kept.want_dbias:
        return *grads, None
    # Where devices share a bias, these were made in one place.
    r = kept.residuals
    *grads, dbias = map(_sharding.place_like, grads, (r.out_int16, r.value_16, r.value_16, kept.visibility.bias))
    nothing = Visibility(**{field.name: None for field in dataclasses.fields(Visibility)})
    return *grads, dataclasses.replace(nothing, bias=dbias.astype(kept.visibility.bias.dtype))


# Apart from `attention_core`, since what a plain call keeps does not depend on which of its inputs are differentiated.
masked_attention_core = jax.custom_vjp(_masked_core, nondiff_argnames=("spec",))
masked_attention_core.defvjp(_masked_forward, _masked_backward, symbolic_zeros=True)


def _mean_logits(query, key, visibility: Visibility | None, spec: CallSpec):
    """What smoothing takes from the logits of inputs in canonical form: scale * q . mean(k) [B, N, T].

    K's mean, over the keys of a query's segment, counts as a constant: the core's gradient of K is that of K itself.
    """
    return _run("mean_logits", spec, query, key, visibility)[0]


def _mean_logits_forward(query, key, visibility, spec):
    logits, mean = _run("mean_logits", spec, query, key, visibility)
    # The empty array says in which dtype the gradient is wanted.
    return logits, (jnp.zeros((0, query.shape[2] // key.shape[2]), query.dtype), mean)


def _mean_logits_backward(spec, residuals, dlogits):
    like, mean = residuals
    mean = mean[:, None] if mean.ndim == 3 else mean
    dquery = spec.scale * dlogits.swapaxes(1, 2)[..., None] * jnp.repeat(mean, like.shape[1], axis=2)
    return dquery.astype(like.dtype), None, None


_mean_logits_vjp = jax.custom_vjp(_mean_logits, nondiff_argnames=("spec",))
_mean_logits_vjp.defvjp(_mean_logits_forward, _mean_logits_backward)
mean_logits: Callable[[jax.Array, jax.Array, Visibility | None, CallSpec], jax.Array] = _mean_logits_vjp

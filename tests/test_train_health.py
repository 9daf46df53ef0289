"""Diagnostics: every tensor's error against one's own arithmetic, and what a run's probe sees in each layer."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal
from train_micro import micro_config

from sagebwd_jax import SageConfig, diagnostics
from train.health import attention_operands, make_probe
from train.loss import next_token_loss
from train.step import init_model

NAMES = ("delta", "p", "dp", "ds", "out", "dq", "dk", "dv")


def make_inputs(sigma, length=192, dtype=jnp.float32):
    q, k = (sigma * normal(seed, 1, length, 4, 32) for seed in (0, 1))
    v, do = normal(2, 1, length, 2, 32), normal(3, 1, length, 4, 32)
    return [x.astype(dtype) for x in (q, k[:, :, :2], v, do)]


@functools.cache
def jitted(config):
    return jax.jit(functools.partial(diagnostics.measure_attention, is_causal=True, config=config))


def measured(sigma, config):
    return jitted(config)(*make_inputs(sigma))


def test_errors_are_those_of_attention_and_of_the_quantised_scores():
    """Written out in numpy, float64, with the dense oracle's results as what attention returns."""
    inputs = make_inputs(1.0)
    # Keys of unlike sizes, so that it matters that a key's scale is folded into dS before dS is rounded.
    inputs[1] = inputs[1] * jnp.where(jnp.arange(192) % 3 == 0, 6.0, 0.5)[:, None, None]
    config = SageConfig(key_scale="token")
    report = jitted(config)(*inputs)
    exact = helpers.exact(*inputs, is_causal=True)
    quantized = helpers.oracle(*inputs, is_causal=True, config=config)
    for field in ("out", "dq", "dk", "dv"):
        pair = getattr(quantized, field), getattr(exact, field)
        assert float(report.errors[field].relative_l2) == pytest.approx(helpers.relative_error(*pair), rel=0.02)
        assert float(report.errors[field].cosine) == pytest.approx(helpers.cosine(*pair), abs=1e-4)

    heads = [np.repeat(np.asarray(x, np.float64), 4 // x.shape[2], axis=2)[0].swapaxes(0, 1) for x in inputs]
    q, k, v, do = heads
    seen = np.tril(np.ones((192, 192), bool))
    s = np.where(seen, q @ k.swapaxes(1, 2) / np.sqrt(32), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ds = p * (do @ v.swapaxes(1, 2) - (do * (p @ v)).sum(-1, keepdims=True))
    # The scale of dS is that of a query over 64 keys, after each key's own scale is folded in.
    k_smooth = k - k.mean(1, keepdims=True)
    folded = ds * (np.abs(k_smooth).max(-1) / 127)[:, None, :]
    tiles = folded.reshape(4, 192, 3, 64)
    zeros = np.abs(tiles) < np.abs(tiles).max(-1, keepdims=True) / 127 / 2
    share = (zeros.reshape(4, 192, 192) & seen).sum() / (4 * seen.sum())
    assert float(report.ds_zero_share) == pytest.approx(share, rel=0.01)
    assert float(report.largest_logit) == pytest.approx(np.abs(s[:, seen]).max(), rel=1e-5)


def test_errors_grow_with_the_logits_and_shrink_with_precision():
    """The order of the paper's Table 2: dP is exact to 16 bits, dS is worse than P, and dQ worse than O."""
    small, large = (measured(sigma, SageConfig()) for sigma in (1.0, 5.0))
    precise = measured(5.0, SageConfig.precise())
    for name in NAMES:
        errors = [float(report.errors[name].relative_l2) for report in (small, large, precise)]
        assert errors[0] <= errors[1] < 1, name
        assert errors[2] < 0.6 * errors[1] or name == "dp", name
    worst = {name: float(large.errors[name].relative_l2) for name in NAMES}
    assert worst["dp"] < 0.005 < worst["p"] < worst["ds"] and worst["out"] < worst["dq"]
    assert float(large.largest_logit) > 5 * float(small.largest_logit)


def test_inputs_of_zeros_have_no_error_and_no_nan():
    report = jitted(SageConfig())(*(x * 0 for x in make_inputs(1.0)))
    for name, error in report.errors.items():
        assert float(error.relative_l2) < 1e-6 and float(error.cosine) > 1 - 1e-6, name


def test_a_cotangent_of_another_shape_is_refused():
    q, k, v, _ = make_inputs(1.0)
    with pytest.raises(ValueError, match=r"dout must have query's shape \(1, 192, 4, 32\): got \(1, 192, 2, 32\)"):
        diagnostics.measure_attention(q, k, v, v)


def test_the_probe_sees_each_layers_own_operands():
    """Layer 1 is given large keys: its logits and errors grow, those of layer 0 stay."""
    config = micro_config(attention="sagebwd", recompute="all").model
    graphdef, params = init_model(config, seed=0)
    probe = make_probe(graphdef, config)
    tokens = jax.random.randint(jax.random.key(0), (1, 25), 0, 256)
    before = jax.device_get(probe(params, tokens))
    assert {value.shape for value in before.values()} == {(2,)}
    assert all(0 < before[f"error_{name}"][0] < 0.1 for name in ("p", "ds", "out", "dq", "dk", "dv"))
    assert 0 < before["ds_zero_share"][0] < 0.2
    scale = params["blocks"][1]["attention"]["key_norm"]["scale"]
    scale.set_value(scale[...] * 20)
    after = jax.device_get(probe(params, tokens))
    assert after["largest_logit"][0] == before["largest_logit"][0]
    assert after["largest_logit"][1] == pytest.approx(20 * before["largest_logit"][1], rel=1e-3)
    assert after["error_dq"][1] > 2 * before["error_dq"][1]


def test_the_probes_cotangent_is_the_models():
    """dv of layer 0, as the probe has it, is the gradient that reaches the value projection."""
    config = micro_config(attention="exact", num_layers=1).model
    graphdef, params = init_model(config, seed=0)
    tokens = jax.random.randint(jax.random.key(0), (1, 25), 0, 256)
    [(q, k, v, do)] = jax.jit(lambda p: attention_operands(graphdef, p, tokens, config))(params)
    dv = helpers.exact(q, k, v, do, is_causal=True).dv[0]
    model = nnx.merge(graphdef, params)
    x = model.blocks[0].attention_norm(model.embed(tokens[:, :-1]))[0]
    grads = jax.jit(jax.grad(lambda p: next_token_loss(nnx.merge(graphdef, p), tokens)))(params)
    expected = grads["blocks"][0]["attention"]["value"]["kernel"][...]
    assert helpers.relative_error(jnp.einsum("tw,tkh->wkh", x, dv), expected) < 1e-5

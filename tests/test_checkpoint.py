"""jax.checkpoint around attention: what its policies keep, how often kernels run, and that no bit depends on it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_bitwise, count_kernels, normal, using

from sagebwd_jax import RESIDUAL_NAMES, attention

LAYERS = 4


def stacked(implementation, wrap, **options):
    """Gradient of LAYERS residual attention layers in a row."""

    def layer(x, key, value):
        with using(implementation) as name:
            return x + attention(x, key, value, implementation=name, is_causal=True, **options)

    def loss(x, keys, values):
        for i in range(LAYERS):
            x = wrap(layer)(x, keys[i], values[i])
        return jnp.sum(x**2)

    return jax.grad(loss, argnums=(0, 1, 2))


NAMED = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
CHECKPOINTS = {
    "none": (lambda f: f, LAYERS),
    "nothing-saved": (jax.checkpoint, 2 * LAYERS),
    "residuals-saved": (functools.partial(jax.checkpoint, policy=NAMED), LAYERS),
}


class TestCheckpoint:
    def inputs(self):
        x = normal(0, 1, 66, 2, 32)
        return x, normal(1, LAYERS, 1, 66, 1, 32), normal(2, LAYERS, 1, 66, 1, 32)

    @pytest.mark.parametrize("masks", ["none", "bias-and-mask", "segments-and-window"])
    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_forward_kernels(self, name, masks):
        wrap, expected = CHECKPOINTS[name]
        options = {
            "none": {},
            "bias-and-mask": dict(bias=normal(3, 1, 2, 66, 66), mask=normal(4, 1, 1, 66, 66) > -0.5),
            "segments-and-window": dict(query_segment_ids=jnp.arange(66)[None] // 40, local_window_size=20),
        }
        assert self.count(wrap, "sagebwd_forward", **options[masks]) == expected

    def count(self, wrap, name, **options):
        with using("triton-interpreted"):
            return count_kernels(stacked("triton-interpreted", wrap, **options), *self.inputs(), name=name)

    @pytest.mark.parametrize("name", ["nothing-saved", "residuals-saved"])
    def test_gradients_are_bitwise_equal(self, implementation, name):
        got, expected = (jax.jit(stacked(implementation, CHECKPOINTS[x][0]))(*self.inputs()) for x in (name, "none"))
        assert_bitwise(list(got), list(expected))

    def test_each_name_saves_a_kernel(self):
        # All but V's: that residual is V itself, rounded to 16 bits if it was not.
        for name in set(RESIDUAL_NAMES) - {"sagebwd_value"}:
            names = [x for x in RESIDUAL_NAMES if x != name]
            policy = jax.checkpoint_policies.save_only_these_names(*names)
            without = self.count(functools.partial(jax.checkpoint, policy=policy), "sagebwd_")
            assert without > self.count(CHECKPOINTS["residuals-saved"][0], "sagebwd_"), name

    @pytest.mark.parametrize("name", ["nothing-saved", "residuals-saved"])
    def test_scan_over_layers(self, cpu_implementation, name):
        def loss(wrap, x, keys, values):
            def layer(x, kv):
                with using(cpu_implementation) as implementation:
                    return x + attention(x, *kv, implementation=implementation, is_causal=True), None

            x, _ = jax.lax.scan(wrap(layer), x, (keys, values))
            return jnp.sum(x**2)

        got, expected = (
            jax.jit(jax.grad(functools.partial(loss, CHECKPOINTS[x][0]), argnums=(0, 1, 2)))(*self.inputs())
            for x in (name, "none")
        )
        assert_bitwise(list(got), list(expected))

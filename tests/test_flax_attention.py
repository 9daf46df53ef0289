"""The Flax block: RoPE, QK-norm, grouped-query, dtypes, and its gradients with SageBwd against exact attention."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sagebwd_jax import attention
from sagebwd_jax.flax import QKNormAttention, RMSNorm, apply_rope

B, T, W, N, K, H = 2, 11, 40, 6, 3, 8
EXACT = functools.partial(jax.nn.dot_product_attention, implementation="xla")


class Recorder:
    """Exact attention that keeps what it was called with."""

    def __call__(self, query, key, value, **options):
        self.query, self.key, self.value, self.options = query, key, value, options
        return EXACT(query, key, value, is_causal=options["is_causal"])


def make_block(**overrides):
    """A block of distinct sizes, float32 and exact unless told otherwise."""
    options = dict(num_heads=N, num_kv_heads=K, head_dim=H, attention_fn=EXACT, dtype=jnp.float32, rngs=nnx.Rngs(7))
    return QKNormAttention(W, **(options | overrides))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


class TestRope:
    def test_turns_channel_pairs_by_position_times_frequency(self):
        x, theta = np.asarray(normal(0, B, T, N, H)), 500.0
        pairs = x[..., : H // 2] + 1j * x[..., H // 2 :]
        angles = np.arange(T)[:, None] * theta ** (-2 * np.arange(H // 2) / H)
        expected = pairs * np.exp(1j * angles)[:, None]
        got = apply_rope(jnp.asarray(x), theta=theta)
        np.testing.assert_allclose(got, np.concatenate([expected.real, expected.imag], -1), atol=1e-5)

    def test_scores_depend_on_distance_alone(self):
        q, k = normal(1, B, T, N, H), normal(2, B, T, N, H)

        def scores(q_positions, k_positions):
            turned = apply_rope(q, q_positions[None]), apply_rope(k, k_positions[None])
            return jnp.einsum("btnh,bsnh->bnts", *turned)

        positions = jnp.arange(T)
        near, moved = scores(positions, positions), scores(positions + 100, positions + 100)
        chex.assert_trees_all_close(near, moved, atol=1e-4)
        assert jnp.abs(near - scores(positions + 1, positions)).max() > 0.1

    def test_positions_of_every_sequence(self):
        x = normal(3, B, T, N, H)
        positions = jnp.stack([jnp.arange(T), jnp.arange(T) + 5])
        got = apply_rope(x, positions)
        chex.assert_trees_all_close(got[:1], apply_rope(x[:1]), atol=1e-6)
        chex.assert_trees_all_close(got[1:], apply_rope(x[1:], positions[1:]), atol=1e-6)

    def test_bfloat16_is_rounded_once(self):
        x = normal(4, 1, 4096, 1, H).astype(jnp.bfloat16)
        got = apply_rope(x)
        assert got.dtype == jnp.bfloat16
        chex.assert_trees_all_equal(got, apply_rope(x.astype(jnp.float32)).astype(jnp.bfloat16))

    def test_odd_head_dim_is_refused(self):
        with pytest.raises(ValueError, match="head_dim=7 must be even"):
            apply_rope(jnp.ones((B, T, N, 7)))


class TestRMSNorm:
    def test_matches_formula_and_rounds_once(self):
        norm = RMSNorm(W, eps=1e-3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        # 1 + 2^-9 is not a bfloat16: a gain rounded before the product would be lost.
        gain = np.where(np.arange(W) % 2, 1 + 2.0**-9, 3.0).astype(np.float32)
        norm.scale[...] = jnp.asarray(gain)
        x = np.asarray(normal(5, B, T, W), np.float32)
        expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-3) * gain
        got = norm(jnp.asarray(x))
        assert got.dtype == jnp.bfloat16
        mismatched = np.mean(np.asarray(got) != np.asarray(jnp.asarray(expected).astype(jnp.bfloat16)))
        assert mismatched < 0.01  # the last bit of float32 may tip a tie

    def test_statistics_are_float32(self):
        x = jnp.full((1, W), 300.0, jnp.float16)  # 300^2 overflows float16
        got = RMSNorm(W, dtype=jnp.float16, rngs=nnx.Rngs(0))(x)
        np.testing.assert_allclose(got, np.ones((1, W)), rtol=1e-3)


class TestQKNorm:
    def test_unit_rms_of_every_head_before_the_gain(self):
        recorder = Recorder()
        make_block(attention_fn=recorder)(10 * normal(6, B, T, W))
        for x, heads in ((recorder.query, N), (recorder.key, K)):
            chex.assert_shape(x, (B, T, heads, H))
            # RoPE turns, it does not stretch, so the RMS of the norm is still there.
            np.testing.assert_allclose(jnp.sqrt(jnp.mean(x**2, -1)), np.ones((B, T, heads)), rtol=1e-4)

    def test_gain_comes_before_rope(self):
        recorder = Recorder()
        block = make_block(attention_fn=recorder)
        gains = {"query_norm": jnp.linspace(0.5, 2.0, H), "key_norm": jnp.linspace(3.0, 1.0, H)}
        for name, gain in gains.items():
            getattr(block, name).scale[...] = gain
        x = normal(7, B, T, W)
        block(x)
        for name, projection, got in (
            ("query_norm", block.query, recorder.query),
            ("key_norm", block.key, recorder.key),
        ):
            heads = jnp.einsum("btw,wnh->btnh", x, projection.kernel[...])
            unit = heads / jnp.sqrt(jnp.mean(heads**2, -1, keepdims=True))
            chex.assert_trees_all_close(got, apply_rope(unit * gains[name]), atol=1e-3)

    def test_values_are_not_normalized(self):
        recorder = Recorder()
        block, x = make_block(attention_fn=recorder), normal(8, B, T, W)
        block(x)
        chex.assert_trees_all_close(recorder.value, jnp.einsum("btw,wnh->btnh", x, block.value.kernel[...]), atol=1e-5)

    def test_can_be_switched_off(self):
        recorder = Recorder()
        block, x = make_block(attention_fn=recorder, qk_norm=False), normal(9, B, T, W)
        block(x)
        chex.assert_trees_all_close(
            recorder.key, apply_rope(jnp.einsum("btw,wnh->btnh", x, block.key.kernel[...])), atol=1e-5
        )
        assert not [path for path, _ in nnx.to_flat_state(nnx.state(block, nnx.Param)) if "key_norm" in path]


class TestBlock:
    def test_grouped_query_is_multi_head_with_repeated_keys_and_values(self):
        grouped, full = make_block(), make_block(num_kv_heads=N)
        chex.assert_shape(grouped.key.kernel[...], (W, K, H))
        for name in ("query", "out"):
            getattr(full, name).kernel[...] = getattr(grouped, name).kernel[...]
        for name in ("key", "value"):
            getattr(full, name).kernel[...] = jnp.repeat(getattr(grouped, name).kernel[...], N // K, axis=1)
        x = normal(10, B, T, W)
        chex.assert_trees_all_close(grouped(x), full(x), atol=1e-5)

    def test_output_projection_sums_heads_and_channels(self):
        block = make_block(attention_fn=lambda q, k, v, is_causal: q)
        recorder = Recorder()
        block_like = make_block(attention_fn=recorder)
        x = normal(11, B, T, W)
        block_like(x)
        expected = jnp.einsum("btnh,nhw->btw", recorder.query, block.out.kernel[...])
        chex.assert_trees_all_close(block(x), expected, atol=1e-5)

    def test_causality_is_passed_on(self):
        x = normal(12, B, T, W)
        changed = x.at[:, -1].add(1.0)
        causal, bidirectional = make_block(), make_block(is_causal=False)
        chex.assert_trees_all_equal(causal(x)[:, :-1], causal(changed)[:, :-1])
        assert jnp.abs(bidirectional(x)[:, :-1] - bidirectional(changed)[:, :-1]).max() > 1e-3

    def test_options_and_positions_reach_their_target(self):
        recorder = Recorder()
        block, x = make_block(attention_fn=recorder), normal(13, B, T, W)
        block(x)
        at_zero = recorder.query
        lengths = jnp.asarray([3, T])
        block(x, positions=jnp.arange(T)[None] + 9, key_value_seq_lengths=lengths)
        assert recorder.options == {"is_causal": True, "key_value_seq_lengths": lengths}
        unturned = apply_rope(recorder.query, -jnp.arange(T)[None] - 9)
        chex.assert_trees_all_close(apply_rope(unturned), at_zero, atol=1e-4)

    def test_head_dim_defaults_to_a_share_of_the_width(self):
        recorder = Recorder()
        QKNormAttention(W, 5, attention_fn=recorder, rngs=nnx.Rngs(0))(normal(14, B, T, W))
        chex.assert_shape([recorder.query, recorder.key, recorder.value], (B, T, 5, 8))

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ((W, 6, 4, 8), "num_heads=6 must be a multiple of num_kv_heads=4"),
            ((W, 6, 3), "width=40 must be a multiple of num_heads=6 unless head_dim is given"),
        ],
    )
    def test_sizes_that_do_not_fit_are_refused(self, sizes, message):
        with pytest.raises(ValueError, match=message):
            QKNormAttention(*sizes, attention_fn=EXACT, rngs=nnx.Rngs(0))


class TestDtypes:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
    def test_attention_gets_one_dtype_and_parameters_stay_float32(self, dtype):
        recorder = Recorder()
        graphdef, params = nnx.split(make_block(attention_fn=recorder, dtype=dtype))
        x = normal(15, B, T, W).astype(dtype)

        def total(params):
            out = nnx.merge(graphdef, params)(x)
            assert out.dtype == dtype
            return jnp.sum(out.astype(jnp.float32))

        grads = jax.eval_shape(jax.grad(total), params)  # float16 does not run everywhere
        assert {recorder.query.dtype, recorder.key.dtype, recorder.value.dtype} == {jnp.dtype(dtype)}
        for tree in (params, grads):
            assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.float32)}

    def test_initialization_runs_on_shapes_alone(self):
        shapes = nnx.eval_shape(make_block)
        chex.assert_trees_all_equal_shapes_and_dtypes(nnx.state(shapes), nnx.state(make_block()))
        for batch, length in ((1, 1), (4, 257)):
            chex.assert_shape(make_block()(jnp.ones((batch, length, W))), (batch, length, W))


class TestSageBwd:
    """The block with the attention it is made for; 150 tokens are more than one tile."""

    def test_is_the_default_and_close_to_exact(self):
        assert QKNormAttention(W, 5, rngs=nnx.Rngs(0)).attention_fn is attention
        x = normal(16, B, 150, W).astype(jnp.bfloat16)
        got, exact = (jax.jit(make_block(attention_fn=fn, dtype=jnp.bfloat16).__call__)(x) for fn in (attention, EXACT))
        assert got.dtype == jnp.bfloat16
        error = jnp.linalg.norm((got - exact).astype(jnp.float32)) / jnp.linalg.norm(exact.astype(jnp.float32))
        assert 1e-4 < error < 0.03

    @pytest.mark.parametrize("gain", [1.0, 3.0])
    def test_gradients_of_the_projections_match_exact_attention(self, gain):
        got, exact = (projection_gradients(is_exact)(gain) for is_exact in (False, True))
        for name in ("query", "key", "value", "out"):
            norms = np.linalg.norm(got[name]), np.linalg.norm(exact[name])
            cosine = np.vdot(got[name], exact[name]) / (norms[0] * norms[1])
            assert abs(norms[0] / norms[1] - 1) < 0.05 and cosine > 0.99, (name, norms, cosine)


@functools.cache
def projection_gradients(is_exact):
    """Gradients of the four kernels as a function of the gain of both norms."""
    x, dout = normal(17, B, 150, W).astype(jnp.bfloat16), normal(18, B, 150, W)
    graphdef, params = nnx.split(make_block(attention_fn=EXACT if is_exact else attention, dtype=jnp.bfloat16))

    def loss(params, gain):
        block = nnx.merge(graphdef, params)
        for norm in (block.query_norm, block.key_norm):
            norm.scale[...] = gain * norm.scale[...]
        return jnp.sum(dout * block(x).astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss))

    def kernels(gain):
        grads = gradient(params, jnp.float32(gain))
        names = ("query", "key", "value", "out")
        return {name: np.asarray(grads[name]["kernel"][...], np.float64).ravel() for name in names}

    return kernels

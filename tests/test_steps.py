"""The steps that the kernels are built of, each against its definition."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from helpers import call_spec, make_inputs, normal, relative_error

from pallas_kernels import attention as triton
from pallas_kernels import launch, ptx, quantize, statistics, steps
from sagebwd_jax import SageConfig, _quantize, _xla


@pytest.fixture(autouse=True)
def interpreted():
    with launch.interpreted():
        yield


def dequantize(x_int8, scale):
    return x_int8.astype(jnp.float32) * scale


class TestSwizzle16:
    def test_is_the_documented_permutation(self):
        swizzled = np.asarray(steps.swizzle16(jnp.arange(48)))
        for group in range(3):
            for h in range(2):
                for t in range(4):
                    for e in range(2):
                        assert swizzled[16 * group + 4 * t + 2 * h + e] == 16 * group + 8 * h + 2 * t + e

    def test_permutes_the_last_axis_alone(self):
        x = normal(0, 3, 5, 32)
        order = steps.swizzle16(jnp.arange(32))
        assert (steps.swizzle16(x) == x[..., order]).all()
        assert sorted(np.asarray(order)) == list(range(32))

    def test_cancels_in_a_product(self):
        a, b = (jax.random.randint(jax.random.key(i), (n, 64), -127, 128, jnp.int8) for i, n in ((0, 5), (1, 7)))
        plain = np.asarray(a, np.int64) @ np.asarray(b, np.int64).T
        assert (np.asarray(steps.dot_int8(steps.swizzle16(a), steps.swizzle16(b))) == plain).all()
        assert not (np.asarray(steps.dot_int8(steps.swizzle16(a), b)) == plain).all()


class TestRounding:
    def test_to_int8_nearest_ties_to_even(self):
        x = jnp.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 3.4999, 3.5001, 0.0])
        expected = [0, 2, 2, 0, -2, -2, 126, -126, 3, 4, 0]
        for round_to_int8 in (ptx.round_to_int8, _quantize.round_to_int8):
            assert round_to_int8(x).dtype == jnp.int8
            assert round_to_int8(x).tolist() == expected

    def test_nan_becomes_zero(self):
        assert ptx.round_to_int8(jnp.array([jnp.nan])).tolist() == [0]
        assert ptx.round_to_int16(jnp.array([jnp.nan, 2.5, -32767.0])).tolist() == [0, 2, -32767]

    @pytest.mark.parametrize("absmax", [1e-30, 1.0, 3.3, 1e30])
    def test_scale_brings_the_largest_to_127(self, absmax):
        scale, inverse = steps.scale_and_inverse(jnp.float32(absmax))
        assert abs(scale * 127 / absmax - 1) < 1e-6
        assert ptx.round_to_int8(jnp.array([absmax, -absmax], jnp.float32) * inverse).tolist() == [127, -127]

    def test_scale_of_zero_and_of_what_is_not_finite(self):
        scale, inverse = steps.scale_and_inverse(jnp.array([0.0, jnp.inf, jnp.nan, 1e-42]))
        assert (scale[0], inverse[0]) == (0, 0)
        assert jnp.isnan(scale[1]) and jnp.isnan(scale[2])
        assert jnp.isfinite(inverse[3])

    def test_magnitude_makes_nan_infinite(self):
        got = steps.magnitude(jnp.array([-2.0, jnp.nan, -jnp.inf, 0.0])).tolist()
        assert got == [2.0, np.inf, np.inf, 0.0]


class TestQuantizeRow:
    @pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
    def test_scale_is_a_row_s_largest_over_127(self, size):
        x = normal(0, 5, 32) * size
        x_int8, scale = steps.quantize_row(x)
        largest = jnp.abs(x).max(1)
        assert relative_error(scale, largest / 127) < 1e-6
        order = steps.swizzle16(jnp.arange(32))
        assert (jnp.abs(dequantize(x_int8, scale[:, None]) - x[:, order]) <= 0.501 * scale[:, None]).all()
        assert (jnp.abs(x_int8).max(1) == 127).all()

    def test_whole_tile_shares_the_largest(self):
        x = normal(0, 5, 32) * jnp.array([1, 2, 3, 4, 100.0])[:, None]
        x_int8, scale = steps.quantize_row(x, whole_tile=True)
        assert jnp.unique(scale).size == 1
        assert relative_error(scale[0], jnp.abs(x).max() / 127) < 1e-6
        assert jnp.abs(x_int8).max() == 127

    def test_zeros_stay_zeros(self):
        x_int8, scale = steps.quantize_row(jnp.zeros((3, 16)))
        assert not x_int8.any() and jnp.isfinite(scale).all()

    def test_is_what_plain_jax_does(self):
        x = normal(0, 64, 32)
        order = steps.swizzle16(jnp.arange(32))
        for whole_tile, rows in ((False, 1), (True, 64)):
            x_int8, scale = steps.quantize_row(x, whole_tile=whole_tile)
            expected, expected_scale = _quantize.round_rows(x, rows)
            assert (x_int8 == expected[:, order]).mean() > 0.999
            assert relative_error(scale, expected_scale) < 1e-6


class TestAdvanceShift:
    def run(self, tile_peaks):
        peak = shift = jnp.array([steps.NO_SCORE])
        shifts, factors = [], []
        for tile_peak in tile_peaks:
            peak, shift, factor = steps.advance_shift(peak, shift, jnp.array([float(tile_peak)]))
            shifts.append(float(shift[0]))
            factors.append(float(factor[0]))
        return shifts, factors

    def test_is_the_tile_s_own_maximum(self):
        shifts, factors = self.run([3, 5, -7])
        assert shifts == [3, 5, -7]
        assert factors == [0, 2.0**-2, 2.0**12]

    def test_lags_at_most_64_behind_the_running_maximum(self):
        shifts, factors = self.run([10, -1000, -(2.0**100), 20])
        assert shifts == [10, 10 - steps.MAX_LAG, 10 - steps.MAX_LAG, 20]
        assert np.isfinite(factors).all()

    def test_of_scores_far_below_zero(self):
        shifts, factors = self.run([-1.5e5, -1.4e5])
        assert shifts == [-1.5e5, -1.4e5] and factors == [0, 0]


class TestPhases:
    """Every tile that holds a score that counts is visited once, and the others need no mask."""

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize(("block_q", "block_k"), [(64, 128), (128, 64), (128, 128)])
    @pytest.mark.parametrize(("queries", "keys"), [(300, 300), (100, 300), (300, 100), (1, 1), (384, 257)])
    def test_cover_the_scores(self, is_causal, block_q, block_k, queries, keys):
        counts = np.zeros((384, 384), bool)
        counts[:queries, :keys] = np.tri(queries, keys) if is_causal else True
        tiles = counts.reshape(384 // block_q, block_q, 384 // block_k, block_k).swapaxes(1, 2)
        length = dict(is_causal=is_causal)
        for i in range(-(-queries // block_q)):
            phases = steps.key_phases(i, block_q, block_k, key_length=keys, **length)
            self.check(phases, tiles[i], tiles_count_rows=queries - i * block_q)
        for j in range(-(-keys // block_k)):
            for mask_all in (False, True):
                phases = steps.query_phases(j, block_q, block_k, query_length=queries, mask_all=mask_all, **length)
                visited = self.visits(phases, tiles.shape[0])
                for i, tile in enumerate(tiles[:, j]):
                    assert visited.get(i) is not None or not tile.any()
                    # Rows that are not queries are 0 by their log-sum-exp, columns that are not keys are not read.
                    inside = np.tri(384, 384, dtype=bool) if is_causal else np.ones((384, 384), bool)
                    inside = inside.reshape(384 // block_q, block_q, 384 // block_k, block_k).swapaxes(1, 2)[i, j]
                    if visited.get(i) is False:
                        assert inside.all()

    def visits(self, phases, tiles):
        visited = {}
        for first, end, edge, *_ in phases:
            for i in range(int(first), int(end)):
                assert i not in visited and i < tiles
                visited[i] = edge
        return visited

    def check(self, phases, tiles, tiles_count_rows):
        visited = self.visits(phases, len(tiles))
        for j, tile in enumerate(tiles):
            assert j in visited or not tile.any()
            if visited.get(j) is False:
                assert tile[:tiles_count_rows].all()


class TestQuantizeKernels:
    def test_tokens(self):
        x = normal(0, 2, 256, 3, 32, dtype=jnp.bfloat16)
        mean = normal(1, 2, 3, 32)
        for block in (1, 64):
            x_int8, scale, smooth = quantize.quantize_tokens(
                x, mean, block=block, length=200, factor=3.0, repeat_scale=True, keep_16_bits=True
            )
            smooth = smooth.swapaxes(1, 2)
            expected = 3 * (x.astype(jnp.float32) - mean[:, None]).at[:, 200:].set(0)
            assert relative_error(smooth, expected) < 3e-3
            got = dequantize(x_int8, scale[..., None]).swapaxes(1, 2)
            assert relative_error(got, expected) < (0.006 if block == 1 else 0.012)
            assert not got[:, 200:].any()
            largest = jnp.abs(expected).max(3).swapaxes(1, 2).reshape(2, 3, 256 // block, block).max(3)
            assert relative_error(scale, jnp.repeat(largest, block, axis=2) / 127) < 1e-6

    # 35 tiles: not a whole number of the pieces in which partial results are read.
    @pytest.mark.parametrize("tiles", [1, 35])
    def test_channel_statistics(self, tiles):
        key, value = normal(0, 2, tiles * 128, 3, 32), normal(1, 2, tiles * 128, 3, 32, dtype=jnp.bfloat16)
        length = tiles * 128 - 5
        key = key.at[:, length:].set(0)
        mean, absmax = statistics.channel_statistics(key, value, length=length)
        assert relative_error(mean, key[:, :length].mean(1)) < 1e-5
        assert (absmax == jnp.abs(value).max(1).astype(jnp.float32)).all()
        alone, nothing = statistics.channel_statistics(key, None, length=length)
        assert nothing is None and (alone == mean).all()
        nothing, alone = statistics.channel_statistics(None, value, length=length)
        assert nothing is None and (alone == absmax).all()

    def test_channel_statistics_keep_what_is_not_finite_in_its_head(self):
        x = normal(0, 1, 256, 2, 32).at[0, 130, 0, 3].set(jnp.nan)
        mean, absmax = statistics.channel_statistics(x, x, length=256)
        assert jnp.isnan(mean[0, 0, 3]) and absmax[0, 0, 3] == jnp.inf
        assert jnp.isfinite(mean).sum() == jnp.isfinite(absmax).sum() == 63

    def test_mean_logits(self):
        query, mean = normal(0, 2, 256, 6, 32, dtype=jnp.bfloat16), normal(1, 2, 3, 32)
        got = statistics.mean_logits(query, mean, scale=0.5)
        expected = 0.5 * jnp.einsum("BTNH,BNH->BNT", query.astype(jnp.float32), jnp.repeat(mean, 2, axis=1))
        assert relative_error(got, expected) < 1e-6

    def test_turned_is_transposed_and_swizzled(self):
        x = jax.random.randint(jax.random.key(0), (2, 3, 256, 32), -127, 128, jnp.int8)
        assert (quantize.turn(x) == steps.swizzle16(x.swapaxes(2, 3))).all()

    def test_values_by_channel_and_by_block(self):
        x = normal(0, 2, 256, 3, 32)
        order = steps.swizzle16(jnp.arange(256))
        turned = x.transpose(0, 2, 3, 1)[..., order]
        absmax = jnp.abs(x).max(1)
        by_channel = dequantize(quantize.quantize_channels(x, absmax), (absmax / 127)[..., None])
        assert relative_error(by_channel, turned) < 0.012
        x_int8, scale = quantize.quantize_blocks(x, block=64)
        assert scale.shape == (2, 3, 4)
        # A swizzle stays within 16 tokens, so also within a block.
        assert relative_error(dequantize(x_int8, jnp.repeat(scale, 64, axis=2)[:, :, None]), turned) < 0.012


@pytest.mark.parametrize("config", [SageConfig(), SageConfig.mixed(), SageConfig.precise()])
@pytest.mark.parametrize("module", [_xla, triton], ids=["xla", "triton"])
def test_residuals_have_the_types_that_they_declare(module, config):
    spec = call_spec(100, 300, config=config)

    def check(query, key, value):
        _, _, residuals = module.forward(query, key, value, spec=spec, keep=True)
        # One context: an axis letter has one size.
        with jaxtyping.jaxtyped("context"):
            for field in dataclasses.fields(residuals):
                assert isinstance(getattr(residuals, field.name), field.type), field.name
        return residuals

    kept = jax.eval_shape(check, *make_inputs(128, 384, dtype=jnp.bfloat16)[:3])
    other = _xla if module is triton else triton
    expected = jax.eval_shape(
        lambda *x: other.forward(*x, spec=spec, keep=True)[2], *make_inputs(128, 384, dtype=jnp.bfloat16)[:3]
    )
    assert jax.tree.structure(kept) == jax.tree.structure(expected)
    assert jax.tree.leaves(kept) == jax.tree.leaves(expected)

"""Which tiles the kernels visit: all that hold a score that counts and few others; and which of them need masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import call_spec, make_inputs, normal, relative_error, using

from pallas_kernels import masking
from pallas_kernels.launch import Tile
from sagebwd_jax import SageConfig, _masks, attention
from sagebwd_jax.reference import visible_scores

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
few = hypothesis.settings(max_examples=10, deadline=None, derandomize=True, database=None)

B, N = 2, 3


def ranges_of(queries, keys, block_q, block_k, owns_keys, is_causal=False, batch=B, **options):
    """The ranges [B, N, tiles, 4]."""
    sizes = _masks.Sizes(batch=batch, queries=queries, keys=keys, heads=N, batched=True)
    given = dict.fromkeys(
        ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths", "local_window_size")
        + ("query_segment_ids", "key_value_segment_ids")
    )
    window, visibility = _masks.canonical(sizes, **given | options)
    spec = call_spec(queries, keys, is_causal=is_causal, window=window)
    tile = Tile(block_q=block_q, block_k=block_k, num_warps=4, num_stages=2)
    visibility = _masks.Visibility() if visibility is None else visibility
    ranges = masking.tile_ranges(visibility, spec=spec, tile=tile, owns_keys=owns_keys)
    return np.broadcast_to(ranges, (batch, N, *ranges.shape[2:]))


def ranges_and_scores(queries, keys, *blocks_and_owner, batch=B, is_causal=False, **options):
    """The ranges, and which scores count by the oracle [B, N, T, S], padded to whole tiles."""
    ranges = ranges_of(queries, keys, *blocks_and_owner, is_causal=is_causal, batch=batch, **options)
    seen = visible_scores(
        jnp.zeros((batch, queries, N, 1)), jnp.zeros((batch, keys, N, 1)), **options, is_causal=is_causal
    )
    seen = np.broadcast_to(seen, (batch, N, queries, keys))
    seen = np.pad(seen, ((0, 0), (0, 0), (0, -queries % 128), (0, -keys % 128)))
    return ranges, seen


def tiled(seen, block_q, block_k, owns_keys):
    """[B, N, owned tiles, visited tiles, scores of a tile]."""
    batch, heads, queries, keys = seen.shape
    x = seen.reshape(batch, heads, queries // block_q, block_q, keys // block_k, block_k)
    x = x.transpose(0, 1, 4, 2, 3, 5) if owns_keys else x.transpose(0, 1, 2, 4, 3, 5)
    return x.reshape(*x.shape[:4], -1)


def visits(ranges):
    """Tiles that all programs visit."""
    return (ranges[..., 3] - ranges[..., 0]).sum()


@few
@hypothesis.given(
    # Few shapes, since each compiles.
    sizes=st.sampled_from([(70, 300), (257, 257), (300, 65)]),
    blocks=st.sampled_from([(64, 128), (128, 32)]),
    owns_keys=st.booleans(),
    is_causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(0, 200), st.integers(0, 200)),
    share=st.sampled_from([None, 0.0005, 0.9995]),
    documents=st.none() | st.integers(1, 5),
    least_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_ranges_hold_what_counts(sizes, blocks, owns_keys, is_causal, window, share, documents, least_bias, seed):
    queries, keys = sizes
    rng = np.random.default_rng(seed)
    options = dict(local_window_size=window)
    if share is not None:
        options |= dict(mask=jnp.array(rng.random((1, N, queries, keys)) < share))
    if documents is not None:
        ids = [np.sort(rng.integers(0, documents, (B, time)), axis=1).astype(np.int32) for time in (queries, keys)]
        options |= dict(query_segment_ids=jnp.array(ids[0]), key_value_segment_ids=jnp.array(ids[1]))
    if least_bias:
        options |= dict(bias=jnp.where(jnp.arange(keys) % 300 < 200, normal(seed, B, 1, 1, keys), -jnp.inf))
    ranges, seen = ranges_and_scores(queries, keys, *blocks, owns_keys, is_causal=is_causal, **options)
    tiles = tiled(seen, *blocks, owns_keys)
    first, whole, whole_end, end = (ranges[..., place, None] for place in range(4))
    places = np.arange(tiles.shape[3])
    assert (first <= whole).all() and (whole <= whole_end).all() and (whole_end <= end).all()
    assert not tiles[(places < first) | (places >= end)].any()
    # Queries that do not exist need no masks: nothing is read of their rows.
    exists = tiled(np.arange(seen.shape[2])[None, None, :, None] < np.full(seen.shape, queries), *blocks, owns_keys)
    assert (tiles | ~exists)[(places >= whole) & (places < whole_end)].all()


@pytest.mark.parametrize("owns_keys", [False, True])
def test_a_window_costs_its_width(owns_keys):
    # 129 tokens touch two or three tiles of 64 keys, whatever the length is.
    few_tiles, _ = ranges_and_scores(1024, 1024, 64, 64, owns_keys, local_window_size=(64, 64))
    assert (few_tiles[..., 3] - few_tiles[..., 0]).max() <= 3
    long, _ = ranges_and_scores(4096, 4096, 64, 64, owns_keys, batch=1, local_window_size=(64, 64))
    assert visits(long) / N <= 4.3 * visits(few_tiles) / (N * B)


@pytest.mark.parametrize("owns_keys", [False, True])
@pytest.mark.parametrize("window", [256, (256, 0)], ids=str)
def test_tiles_of_a_window_grow_with_the_length_alone(owns_keys, window):
    # What the kernels' loops run over: at 32768 tokens a window of 256 tokens to a side is 9 tiles of 64 of 512.
    width = 2 * 256 if window == 256 else 256
    for length in (2048, 32768):
        ranges = ranges_of(length, length, 64, 64, owns_keys, batch=1, local_window_size=window)
        visited = ranges[..., 3] - ranges[..., 0]
        assert visited.shape[-1] == length // 64 and visited.max() == width // 64 + 1
        # Fewer at the ends alone.
        assert (visited[..., 4:-4] == width // 64 + 1).all()


@pytest.mark.parametrize("owns_keys", [False, True])
@pytest.mark.parametrize("names", [(0, 1, 2, 3), (7, 3, 9, -1)], ids=["rising", "any"])
def test_documents_cost_the_sum_of_their_squares(owns_keys, names):
    ids = jnp.repeat(jnp.array(names, jnp.int32), 256)[None]
    ranges, _ = ranges_and_scores(
        1024, 1024, 64, 64, owns_keys, batch=1, query_segment_ids=ids, key_value_segment_ids=ids
    )
    assert visits(ranges) == N * 4 * (256 // 64) ** 2
    # Tiles that lie within a document need no masks.
    assert (ranges[..., 0] == ranges[..., 1]).all() and (ranges[..., 2] == ranges[..., 3]).all()


def test_padding_costs_nothing():
    lengths = jnp.array([64, 1024])
    ranges, _ = ranges_and_scores(1024, 1024, 64, 64, False, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    assert visits(ranges[0]) == N and visits(ranges[1]) == N * 16 * 16


@pytest.fixture
def narrow_ranges(monkeypatch):
    """Call it, and kernels are told to leave out the last tile of each that they would visit."""
    tile_ranges = masking.tile_ranges

    def narrowed(*args, **kwargs):
        ranges = tile_ranges(*args, **kwargs)
        return jnp.minimum(ranges, jnp.maximum(ranges[..., 3:] - 1, 0))

    def narrow():
        # Traces made with the true ranges must not be met again, nor these later.
        jax.clear_caches()
        monkeypatch.setattr(masking, "tile_ranges", narrowed)

    yield narrow
    jax.clear_caches()


@pytest.mark.parametrize("config", [SageConfig(), SageConfig.mixed()], ids=["default", "mixed"])
def test_kernels_visit_no_other_tiles(narrow_ranges, config):
    # Narrowed before the backward pass alone: whatever changes then is due to the loop of the kernel that makes it.
    q, k, v, dout = make_inputs(257, 257, batch=1, heads=2, kv_heads=1, depth=32)
    bias, dlse = normal(9, 1, 2, 257, 257), jnp.ones((1, 257, 2))

    def call(query, key, value, bias):
        options = dict(implementation="triton", config=config, local_window_size=100, return_residual=True)
        return attention(query, key, value, bias, **options)

    with using("triton-interpreted"):
        out, vjp = jax.vjp(call, q, k, v, bias)
        gradients = vjp((dout, dlse))
        narrow_ranges()
        narrowed = vjp((dout, dlse))
        fewer = call(q, k, v, bias)
    for name, got, whole in zip(("dq", "dk", "dv", "dbias"), narrowed, gradients, strict=True):
        assert relative_error(got, whole) > 0.1, name
    for name, got, whole in zip(("out", "lse"), fewer, out, strict=True):
        assert relative_error(jnp.where(jnp.isinf(got), 0.0, got), whole) > 0.01, name

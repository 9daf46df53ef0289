"""Which tiles the kernels use: on every GPU those that the numbers of a config ask for."""

import itertools

import jax.numpy as jnp
import pytest
from helpers import call_spec

from pallas_kernels import tiles
from sagebwd_jax import SageConfig
from sagebwd_jax._masks import Visibility

VISIBILITIES = {
    "no masks": None,
    "a mask": Visibility(mask=jnp.ones((1, 1, 128, 128), jnp.int8)),
    "a bias": Visibility(bias=jnp.zeros((1, 1, 128, 128))),
}


def of_tiles(block_q, block_k):
    """One scale per block of this size for everything."""
    blocks = dict(block_q=block_q, block_k=block_k, dv_span=block_q, dk_span=block_q, pv_span=block_k, dq_span=block_k)
    scales = dict(query_scale="block", value_scale="block", dout_scale="block", grad_scale="tile")
    return SageConfig(**scales, **blocks)


@pytest.mark.parametrize("masks", VISIBILITIES)
@pytest.mark.parametrize("capability", [*tiles.TABLE, (8, 9), None], ids=str)
def test_a_tile_that_shares_a_scale_is_the_block_of_the_config(monkeypatch, capability, masks):
    monkeypatch.setattr(tiles, "target_capability", lambda: capability)
    assert of_tiles(64, 64) == SageConfig.faithful()
    wrong = []
    for block_q, block_k, depth, is_causal in itertools.product((32, 64), (32, 64), (16, 64, 128, 256), (False, True)):
        spec = call_spec(config=of_tiles(block_q, block_k), is_causal=is_causal)
        joint, tile_k, tile_v = tiles.grad_kv_tiles(spec, depth, VISIBILITIES[masks])
        tile_q = tiles.grad_q_tile(spec, depth, VISIBILITIES[masks])
        found = {(tile.block_q, tile.block_k) for tile in (tile_k, tile_v, tile_q)}
        if joint or found != {(block_q, block_k)}:
            wrong.append((block_q, block_k, depth, is_causal, found))
    assert not wrong

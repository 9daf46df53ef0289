"""Which tile each kernel uses: a table of measured rows, and the rule for what it does not list."""

from pallas_kernels.launch import Tile


def forward_tile(spec, depth):
    return Tile(block_q=64, block_k=spec.config.pv_span, num_warps=4, num_stages=2 if depth == 128 else 3)


def grad_kv_tiles(spec, depth):
    c = spec.config
    if c.grad_scale == "tile":
        t = Tile(block_q=c.block_q, block_k=c.block_k, num_warps=4, num_stages=2)
        return False, t, t
    if not spec.uses_int8("dk") and not spec.uses_int8("dv"):
        t = (
            Tile(block_q=64, block_k=128, num_warps=8, num_stages=3)
            if depth == 128
            else Tile(block_q=64, block_k=64, num_warps=4, num_stages=2)
        )
        return True, t, t
    return (
        False,
        Tile(block_q=c.dk_span, block_k=128, num_warps=8, num_stages=3),
        Tile(block_q=c.dv_span, block_k=64, num_warps=4, num_stages=2),
    )


def grad_q_tile(spec, depth):
    c = spec.config
    if c.grad_scale == "tile":
        return Tile(block_q=c.block_q, block_k=c.block_k, num_warps=4, num_stages=2)
    return Tile(block_q=128, block_k=c.dq_span, num_warps=8, num_stages=3 if depth == 128 else 4)

"""Which calls the Hopper kernels take, and how each is laid out: a table of what was measured.

May be changed: any row, with its date, GPU and time. What is not listed, or not supported, runs on the Triton kernels.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.launch import is_interpreted, mapped, target_capability, target_cores, varying_axes

# Rows that a warp group owns: those of one wgmma instruction.
GROUP = 64
CAPABILITY = (9, 0)
MIN_JAX = (0, 11)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """How a kernel is laid out on a multiprocessor.

    Attributes:
      groups: warp groups that compute.
      stages: buffers of the ring that feeds them.
      ahead: whether forward computes S of the next tile beside P V; its registers do not last for depth 128.
    """

    groups: int
    stages: int
    ahead: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One entry.

    Attributes:
      kernel: "forward", "grad_v", "grad_k", "grad_q", "grad_qkv" for the last three at once, or with the gradients'
        products in 16 bits "grad_kv_16", "grad_q_16".
      depth: channels of a head, padded.
      groups, stages, ahead: see `Groups`.
      from_keys: the least number of keys that it is faster for.
      milliseconds: of the kernel at B*T = 16384, 2048 channels, T = 8192, bfloat16; the Triton kernel's is in
        pallas_kernels/tiles.py.
    """

    kernel: str
    depth: int
    is_causal: bool
    groups: int
    stages: int
    milliseconds: float
    from_keys: int = 0
    ahead: bool = False


# H200, 2026-11-29 and 30, JAX 0.11.2; causal rows of depth 128 before their loops lost a branch, causal forward at
# depth 64 before last tiles were halved. Not listed, where the Triton kernels are as fast: grad_v and grad_k at depth
# 64, and grad_q there if causal. The first row that suits a call is taken.
TABLE = (
    Row("forward", 64, False, 3, 2, 2.081, from_keys=32768),
    Row("forward", 64, True, 3, 2, 1.077, from_keys=1024, ahead=True),
    Row("forward", 128, False, 3, 2, 1.282),
    Row("forward", 128, True, 3, 2, 0.704),
    Row("grad_v", 128, False, 3, 2, 1.465),
    Row("grad_v", 128, True, 3, 2, 0.783),
    Row("grad_k", 128, False, 3, 2, 2.682),
    Row("grad_k", 128, True, 3, 2, 1.514),
    Row("grad_q", 64, False, 4, 2, 3.315),
    Row("grad_q", 128, False, 3, 2, 2.363),
    Row("grad_q", 128, True, 3, 2, 1.295),
    Row("grad_qkv", 64, False, 2, 3, 7.540),
    Row("grad_qkv", 64, True, 2, 3, 3.784),
    Row("grad_kv_16", 64, False, 3, 2, 3.635),
    Row("grad_kv_16", 64, True, 3, 2, 1.911),
    Row("grad_kv_16", 128, False, 2, 2, 3.033),
    Row("grad_kv_16", 128, True, 2, 2, 1.604),
    Row("grad_q_16", 64, False, 3, 2, 2.919),
    Row("grad_q_16", 64, True, 3, 2, 1.537),
    Row("grad_q_16", 128, False, 3, 2, 1.971),
    Row("grad_q_16", 128, True, 3, 2, 1.088),
)
# Tokens that a block of `quantize_inputs` holds: 128 take 93 microseconds for 74 (K and V, depth 64, T = 4096; H200,
# 2026-11-30), 512 take 77.
INPUT_ROWS = 256
# Each of its blocks reads the sums of all blocks of a head: with more keys times channels than this it is slower than
# a kernel for each (0.289 ms for 0.262 at 32768 keys, depth 128).
INPUT_CHANNELS = 2**21
# What the two slower axes of a launch can count: batch and heads.
MOST_PROGRAMS = 65535
# The INT8 products that a kernel makes beside S, and the spans that its buffers and products are made for.
_MADE_FOR = dict(
    forward=(("pv",), dict(pv_span=128)),
    grad_v=(("dv",), dict(dv_span=128)),
    grad_k=(("dk",), dict(dk_span=64)),
    grad_q=(("dq",), dict(dq_span=64)),
    grad_qkv=(("dv", "dk", "dq"), dict(dv_span=64, dk_span=64, dq_span=64)),
    grad_kv_16=((), {}),
    grad_q_16=((), dict(dq_span=64)),
)


def available() -> bool:
    """Whether calls are compiled for a GPU and by a JAX that these kernels are for."""
    return not is_interpreted() and target_capability() == CAPABILITY and jax.__version_info__[:2] >= MIN_JAX


def _is_plain(spec, visibility, dtype) -> bool:
    """What all of these kernels ask of a call: no masks, bfloat16, INT8 scores, and the default's scales of K and V."""
    return (
        available()
        and visibility is None
        and dtype == jnp.bfloat16
        and spec.uses_int8("qk")
        and (spec.config.key_scale, spec.config.value_scale) == ("block", "channel")
    )


def takes_inputs(spec, visibility, query, key) -> bool:
    """Whether one kernel quantises Q, K and V of this call, whose blocks of one head must fit on the GPU at once."""
    config, (batch, _, heads, depth), (_, keys, kv_heads, _) = spec.config, query.shape, key.shape
    return (
        _is_plain(spec, visibility, query.dtype)
        and depth in (64, 128)
        and spec.uses_int8("pv")
        and config.smooth_k
        and config.query_scale == "token"
        and config.block_k in (GROUP, 2 * GROUP)
        and keys * depth <= INPUT_CHANNELS
        # Half of what fits: other programs may use the GPU.
        and 2 * keys <= INPUT_ROWS * target_cores()
        and max(batch * mapped(), heads + 2 * kv_heads) <= MOST_PROGRAMS
    )


def find(kernel, spec, visibility, dtype, *tensors) -> Groups | None:
    """The layout of a kernel for this call, or None where the Triton kernels have to run or are faster.

    `visibility` are the call's masks, `dtype` what it was called in, which operands may no longer be in, and `tensors`
    inputs of it [B, time, N, H].
    """
    config, depth = spec.config, tensors[0].shape[-1]
    products, spans = _MADE_FOR[kernel]
    suits = (
        _is_plain(spec, visibility, dtype)
        # vmap's programs are added to those of the batch.
        and all(max(x.shape[0] * mapped(), x.shape[2]) <= MOST_PROGRAMS for x in tensors)
        and not spec.keeps_16_bits(*products)
        and config.grad_scale == "row"
        and all(getattr(config, name) == span for name, span in spans.items())
        # One kernel for all makes dS from P times dO's scale: where dO = 0, it would lose dS of the log-sum-exp's. In a
        # shard_map that checks what varies, JAX gives a kernel no warps of their own (plgpu.warp_map).
        and not (kernel == "grad_qkv" and (spec.differentiates_lse or varying_axes(tensors)))
        # A scale of K must hold for all keys that a group owns.
        and config.block_k >= GROUP
    )
    for row in TABLE if suits else ():
        same = (row.kernel, row.depth, row.is_causal) == (kernel, depth, spec.is_causal)
        if same and spec.key_length >= row.from_keys:
            return Groups(groups=row.groups, stages=row.stages, ahead=row.ahead)
    return None

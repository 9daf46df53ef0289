"""The only file that knows Pallas' Triton backend: how a kernel is launched, loads, and inlines PTX.

JAX has deprecated this backend since 0.11; it works, with one warning, from 0.10.2 to 0.12.0.1. Another backend would
stand beside this file.
"""

import contextlib
import contextvars
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_interpreted = contextvars.ContextVar("interpreted", default=False)
_mapped: contextvars.ContextVar[int] = contextvars.ContextVar("mapped", default=1)
_capability: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("capability", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """How much of the score matrix one program of a kernel holds at a time, and how it is compiled.

    The length along the summed axis is a span of `SageConfig` and changes the numbers; the others do not, unless
    `grad_scale="tile"`.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    # Whether dO V^T of the next tile is computed before this tile's dS, which hides it behind the softmax where the
    # registers suffice.
    dp_ahead: bool = False
    # Whether the last tile of queries comes first, which has the most keys if causal: a shorter tail of the launch.
    last_first: bool = False

    def __post_init__(self):
        for name in ("block_q", "block_k", "num_warps", "num_stages"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1) and name != "num_stages":
                raise ValueError(f"{name}={value}: a power of two is accepted")


@contextlib.contextmanager
def interpreted():
    """Trace kernels for Pallas' interpreter, which runs them on the CPU; for tests."""
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def is_interpreted() -> bool:
    """Whether kernels are being traced for the interpreter, which knows no PTX."""
    return _interpreted.get()


def keep_target(function):
    """`function`, to be traced later for what kernels are traced for now."""
    context = contextvars.copy_context()
    context.run(_capability.set, target_capability())

    def run(*args):
        now = context.copy()
        now.run(_mapped.set, _mapped.get())
        return now.run(function, *args)

    return run


def under_vmap(function, size, in_batched):
    """`function` mapped by vmap; its kernels, traced in the shapes of one call, know that they are `size` calls."""

    def run(*args):
        token = _mapped.set(_mapped.get() * size)
        try:
            return function(*args)
        finally:
            _mapped.reset(token)

    return jax.vmap(run, jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(in_batched)))


def mapped() -> int:
    """How many calls `jax.vmap` makes one of where kernels are being traced."""
    return _mapped.get()


def mappable(function):
    """`function`, which launches kernels, and by which rule vmap maps it: so that they know how many calls they are."""
    call = custom_vmap(function)

    @call.def_vmap
    def _(axis_size, in_batched, *operands):
        out = mappable(under_vmap(function, axis_size, in_batched))(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _check_offsets(name, shape):
    """Refuse an INT8 tensor whose offsets Pallas computes wrongly.

    It takes 64-bit offsets from 2^32 bytes on. Below, an element of one byte can lie further than a signed 32-bit
    offset reaches, which then is negative (seen in PTX as cvt.s64.s32).
    """
    if 2**31 < math.prod(shape) * mapped() <= 2**32:
        times = f", {mapped()} times under vmap" if mapped() > 1 else ""
        raise NotImplementedError(
            f"{name} has an INT8 tensor of shape {shape}{times}: accepted are up to 2^31 elements, or more than 2^32;"
            " split the batch or the heads"
        )


def call(kernel, name, grid, inputs, in_specs, out_shapes, out_specs, *, num_warps, num_stages):
    """Run `kernel` over `grid`, whose first axis moves fastest: neighbours share what they read of one head.

    Pallas folds axes of more than 65535 programs into the first.
    """
    for x in [*inputs, *jax.tree.leaves(out_shapes)]:
        if x.dtype.itemsize == 1:
            _check_offsets(name, x.shape)
    # The kernel's function name is what a profiler shows.
    kernel.__name__ = name
    # In a `shard_map` that checks types, a result varies over the mesh axes that an input varies over.
    if varying := varying_axes(inputs):
        varies = jax.sharding.ManualAxisType(varying=varying)
        out_shapes = jax.tree.map(lambda x: x.update(manual_axis_type=varies), out_shapes)
    launch = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shapes,
        name=name,
        interpret=is_interpreted(),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )
    # In JAX's 64-bit mode the kernels' Python numbers would be of 64 bits, program ids not, and some sums of both fail.
    with jax.enable_x64(False):
        return launch(*inputs)


def varying_axes(arrays) -> frozenset:
    """The mesh axes of a `shard_map` that one of these arrays varies over."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)))


def vary_over(axes, arrays):
    """The same arrays, each said to vary over all these axes, which a `shard_map` may check."""

    def vary(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(vary, arrays)


def inline_ptx(code, constraints, args, dtype, *, pack=1):
    """One PTX instruction (or a few) on each element of the equally shaped `args`, `pack` elements at a time."""
    [result] = plgpu.elementwise_inline_asm(
        code,
        args=args,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return result


def load_rows(ref, first, rows):
    """Rows first..first+rows-1 of a matrix; zeros for those past its end."""
    exists = first + lax.broadcasted_iota(jnp.int32, (rows, ref.shape[1]), 0) < ref.shape[0]
    return plgpu.load(ref.at[pl.ds(first, rows), :], mask=exists, other=0.0)


def own_rows(rows, *depth, heads_last=False, last=None, group=1):
    """The rows that program (i, n, b) owns of [B, N, time, ...], or of [B, time, N, ...] if `heads_last`.

    With `last`, the index of the last tile, that one comes first. The head is n // group.
    """
    tile = (lambda i: i) if last is None else (lambda i: last - i)
    head = (lambda n: n) if group == 1 else (lambda n: n // group)
    if heads_last:
        return pl.BlockSpec((None, rows, None, *depth), lambda i, n, b: (b, tile(i), head(n), *[0] * len(depth)))
    return pl.BlockSpec((None, None, rows, *depth), lambda i, n, b: (b, head(n), tile(i), *[0] * len(depth)))


def own_columns(depth, columns):
    """BlockSpec of the same rows of what is turned: [B, N, H, time]."""
    return pl.BlockSpec((None, None, depth, columns), lambda i, n, b: (b, n, 0, i))


def whole_head(x, *, heads_last=False, group=1):
    """BlockSpec of all of x that head n // group has: [B, N, ...], or [B, time, N, H] if `heads_last`."""
    if heads_last:
        return pl.BlockSpec((None, x.shape[1], None, x.shape[3]), lambda i, n, b: (b, 0, n // group, 0))
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda i, n, b: (b, n // group, *[0] * (x.ndim - 2)))


def whole_group(x, *, heads_last=False, group=1):
    """BlockSpec of all of x that the `group` query heads of key head n have; their axis stays."""
    if heads_last:
        return pl.BlockSpec((None, x.shape[1], group, x.shape[3]), lambda i, n, b: (b, 0, n, 0))
    return pl.BlockSpec((None, group, *x.shape[2:]), lambda i, n, b: (b, n, *[0] * (x.ndim - 2)))


MIN_CAPABILITY = (8, 0)
# Compute capability by device name, for a device that is described, not present (ahead-of-time compilation).
_CAPABILITIES = {
    "A100": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A10G": (8, 6),
    "A40": (8, 6),
    "RTX 3090": (8, 6),
    "L4": (8, 9),
    "L40S": (8, 9),
    "RTX 4090": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "RTX 5090": (12, 0),
    "RTX PRO 6000": (12, 0),
}


def target_capability() -> tuple[int, int] | None:
    """Compute capability of the NVIDIA GPU that calls are compiled for, or None if there is none."""
    if _capability.get() is not None:
        return _capability.get()
    device = jax.devices()[0]
    described = jax.sharding.get_abstract_mesh().abstract_device
    # A mesh of real devices describes them too, by a name that no table need know.
    if described is not None and described.device_kind != device.device_kind:
        names = [name for name in _CAPABILITIES if re.search(rf"\b{name}\b", described.device_kind)]
        return _CAPABILITIES[names[0]] if names else None
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)


# Multiprocessors of an H100 and an H200.
_CORES = 132


def target_cores() -> int:
    """Multiprocessors of the GPU that calls are compiled for; those of an H200 where nothing says how many."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    cores = getattr(described, "num_cores", None) or getattr(jax.devices()[0], "core_count", None)
    return cores or _CORES


def check_target():
    """Refuse to launch where the kernels cannot run."""
    if is_interpreted():
        return
    capability = target_capability()
    if capability is None or capability < MIN_CAPABILITY:
        got = f"the {jax.default_backend()} backend" if capability is None else "capability {}.{}".format(*capability)
        raise NotImplementedError(
            f"implementation='triton' needs an NVIDIA GPU of compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
            f" or higher: got {got}; implementation='xla' runs anywhere"
        )

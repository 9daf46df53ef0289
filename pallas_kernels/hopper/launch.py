"""How the Hopper kernels are launched: buffers, copies, barriers, and which warp group does what.

This file and arrays.py alone know Pallas' Mosaic GPU backend. A block of threads is warp groups, each with a part of
the work (`Part`): in most kernels `groups` that compute, each with GROUP rows of its own, and one that copies what they
share from memory into a ring of `stages` buffers. The backend has no interpreter for what these kernels use: they run
on a GPU, or are compiled for one.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import Groups
from pallas_kernels.launch import vary_over, varying_axes

# Registers of a thread that computes, by the number of groups, and of one that copies. Their sum must not be above what
# the block is launched with, 65536 / threads rounded down to 8 for each thread: the increase would wait forever.
REGISTERS = {2: 240, 3: 160, 4: 112}
COPY_REGISTERS = 24


def matrix(rows, columns, dtype, *lead):
    """A buffer of shared memory that tensor cores can read: [*lead, rows, columns], in tiles and swizzled."""
    size = jnp.dtype(dtype).itemsize
    width = min(128, columns * size)
    transforms = plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM((*lead, rows, columns), dtype, transforms=transforms)


def vectors(count, length, stages):
    """A buffer of `count` float32 vectors for each stage."""
    return plgpu.SMEM((stages, count, length), jnp.float32)


def barriers(count, *, arrivals=1):
    """`count` barriers, each of which completes after `arrivals` copies or groups."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def tile_in(name, ref, batch, head, time):
    """Where these tokens of an operand lie: what is turned and what is INT8 has its heads before its time."""
    if name.endswith("turned"):
        return ref.at[batch, head, :, time]
    return ref.at[batch, head, time] if name in ("q", "k") else ref.at[batch, time, head]


def fetch(source, target, barrier):
    """Start a copy from memory to shared memory; `barrier` counts its end."""
    plgpu.copy_gmem_to_smem(source, target, barrier)


def write(buffer, x):
    """Write an array to a buffer that tensor cores, copies or other groups read next."""
    buffer[:, :] = x.astype(buffer.dtype)
    plgpu.commit_smem()


def store(buffer, target, x):
    """Write an array to `buffer`, and copy that to memory."""
    write(buffer, x)
    plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)


def turns(*shape):
    """Counters in memory that all blocks of the launch share, 0 at its start, for `add_in_turn`."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR(shape))


def add_in_turn(buffer, target, turn, earlier, release):
    """Add a buffer to memory after `earlier` other blocks have, as `turn` counts; the first writes.

    Float32 sums depend on their order: this one does not change from run to run. `release` is called as soon as the
    buffer may be written again.
    """

    @pl.when(earlier == 0)
    def _():
        plgpu.copy_smem_to_gmem(buffer, target)

    @pl.when(earlier > 0)
    def _():
        plgpu.semaphore_wait(turn, earlier, decrement=False, memory_scope="gpu")
        plgpu.copy_smem_to_gmem(buffer, target, reduction_op="add")

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    release()
    plgpu.wait_smem_to_gmem(0)
    plgpu.semaphore_signal(turn, 1, memory_scope="gpu")


def in_warps(*works):
    """Run each of up to four functions in a warp of its own of this group: one does not wait for another's copies."""

    @plgpu.warp_map
    def _(warp):
        for i, work in enumerate(works):
            pl.when(warp == i)(work)


wait, arrive = plgpu.barrier_wait, plgpu.barrier_arrive


def wait_for_buffer(free, step, count):
    """Wait until one of `count` buffers that are written in turn is free; at first all are."""

    @pl.when(step >= count)
    def _():
        wait(free)


def slot_of(step, layout: Groups):
    """The buffer of the ring that holds what a step reads."""
    return lax.rem(step, jnp.int32(layout.stages))


def stream(count, layout: Groups, *loads):
    """The copying group's work: for each step, each load(step, slot) as soon as all groups have freed its slot.

    `loads` are pairs of a function and the barriers of its slots.
    """
    for step in range(layout.stages):

        @pl.when(step < count)
        def _(step=step):
            for load, _ in loads:
                load(jnp.int32(step), step)

    @pl.loop(jnp.int32(layout.stages), jnp.maximum(count, jnp.int32(layout.stages)))
    def _(step):
        slot = slot_of(step, layout)
        for load, free in loads:
            wait(free.at[slot])
            load(step, slot)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a block's work: run(group, *refs) by `groups` warp groups of threads with that many registers."""

    groups: int
    registers: int
    run: Callable


def call(compute, copy, name, grid, inputs, out_shapes, scratch, *, layout: Groups):
    """Run compute(group, *refs) in each computing warp group and copy(*refs) in the copying one, for each program.

    `grid` are the counts of (batch, heads, tiles), the last of which moves fastest: neighbours share what they read of
    one head. The refs are `inputs`, outputs and `scratch`.
    """
    parts = (
        Part(layout.groups, REGISTERS[layout.groups], compute),
        Part(1, COPY_REGISTERS, lambda _, *refs: copy(*refs)),
    )
    return call_parts(parts, name, grid, inputs, out_shapes, scratch)


def call_parts(parts, name, grid, inputs, out_shapes, scratch):
    """As `call`, for another division of the work. Only the first part may be of several groups."""
    groups = sum(part.groups for part in parts)
    launched = registers_at_launch(groups)

    def kernel(*refs):
        group, first = lax.axis_index("group"), 0
        for part in parts:

            @pl.when(group == first if first else group < part.groups)
            def _(part=part):
                action = "increase" if part.registers > launched else "decrease"
                plgpu.set_max_registers(part.registers, action=action)
                part.run(group, *refs)

            first += part.groups

    kernel.__name__ = name
    results = plgpu.kernel(
        kernel,
        out_type=out_shapes,
        scratch_types=scratch,
        grid=grid,
        grid_names=("batch", "head", "tile"),
        num_threads=groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # No group reads shared memory that it writes, but where `write` orders it.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*inputs)
    return vary_over(varying_axes(inputs), results)


def registers_at_launch(groups):
    """What each thread of a block of so many warp groups starts with."""
    return 65536 // (128 * groups) // 8 * 8


def program():
    """(batch, head, tile) of this block."""
    return tuple(lax.axis_index(name) for name in ("batch", "head", "tile"))

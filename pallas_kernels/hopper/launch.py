"""How the Hopper kernels are launched: buffers, copies, barriers, and which warp group does what.

This file and arrays.py alone know Pallas' Mosaic GPU backend. A block of threads is warp groups, each with a part of
the work (`Part`): in most kernels `groups` that compute, each with GROUP rows of its own, and one that copies what they
share from memory into a ring of `stages` buffers. The backend has no interpreter for what these kernels use: they run
on a GPU, or are compiled for one.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.blocks import Blocks
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
    """Write an array to a buffer that tensor cores, copies or other warps read next."""
    buffer[...] = x.astype(buffer.dtype)
    plgpu.commit_smem()


def store(buffer, target, x):
    """Write an array to `buffer`, and copy that to memory; it must stay as it is until `stored`."""
    write(buffer, x)
    plgpu.copy_smem_to_gmem(buffer, target)


def stored(*, but=0):
    """Wait until all buffers of this group that were stored, `but` the last ones, have been read.

    Memory has them at the end of the launch.
    """
    plgpu.wait_smem_to_gmem(but, wait_read_only=True)


def join(turn, count):
    """Wait until `count` blocks have come here with this counter; then each sees what the others wrote to memory.

    All of them must fit on the GPU at once, and blocks must start in their order: those that wait leave room for the
    rest of their head. GPUs do start them so, though no document promises it.
    """
    # All warps have written.
    plgpu.commit_smem()
    plgpu.semaphore_signal(turn, 1, memory_scope="gpu")
    plgpu.semaphore_wait(turn, count, decrement=False, memory_scope="gpu")


def either(*buffers):
    """One of these buffers, in the same place of shared memory."""
    return plgpu.RefUnion(*buffers)


def turns(*shape):
    """Counters in memory that all blocks of the launch share, 0 at its start: for `add_in_turn` and `join`.

    vmap does not add an axis to them: a launch that has some is one of `fold_vmap`.
    """
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

    stored()
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


def stream(count, base, layout: Groups, *loads):
    """The copying group's work: for each step of a block, each load(step, slot) as soon as all groups freed its slot.

    `loads` are pairs of a function and the barriers of its slots; the ring has been through `base` steps before.
    """

    @pl.loop(jnp.int32(0), count)
    def _(step):
        slot = slot_of(base + step, layout)
        for load, free in loads:
            # At first all are free.
            pl.when(base + step >= layout.stages)(functools.partial(wait, free.at[slot]))
            load(step, slot)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a block's work: run(group, *refs) by `groups` warp groups of threads with that many registers.

    None leaves the registers to the compiler; the part is the only one then.
    """

    groups: int
    registers: int | None
    run: Callable


@dataclasses.dataclass(frozen=True)
class Work:
    """What the groups do for a block `at` (batch, head, tile). The refs are inputs, outputs and scratch.

    Attributes:
      fetch(group, at, *refs): starts the copies of what a computing group owns.
      compute(group, here, base, following, *refs): does its work; `here()` says where. Calls following() when it has
        read what it fetched, for the next block's. Returns the block's steps.
      copy(at, base, *refs): fills the ring, which has been through `base` steps before. Returns the block's steps.
    """

    fetch: Callable
    compute: Callable
    copy: Callable


class Mine:
    """The blocks that this program takes."""

    def __init__(self, blocks: Blocks, plan_ref):
        self._blocks, self._plan_ref, self._program = blocks, plan_ref, lax.axis_index("program")
        self.count = blocks.count(self._program, plan_ref)

    def at(self, step):
        """(batch, head, tile) of the step-th."""
        return self._blocks.at(self._program, step, self._plan_ref)

    def each(self, one):
        """one(step, base) for each, which returns its steps; the rings have been through `base` steps before."""
        lax.fori_loop(jnp.int32(0), self.count, lambda step, base: base + one(step, base), jnp.int32(0))

    def compute(self, start, one):
        """As `each`, for what a group fetches by start(at): one(here, base, following), as in `Work`."""

        def run(step, base):
            def here():
                # Not kept: registers are short in a block's loop.
                return self.at(lax.optimization_barrier(step))

            def following():
                # All warps have read what is fetched anew.
                plgpu.commit_smem()
                pl.when(step + 1 < self.count)(lambda: start(self.at(step + 1)))

            return one(here, base, following)

        start(self.at(jnp.int32(0)))
        self.each(run)
        stored()


def stay(parts, name, blocks: Blocks, inputs, out_shapes, scratch):
    """As `call_parts`, in programs that stay: each part's run(mine, group, *refs) goes through the blocks `Mine`."""
    plan = blocks.plan
    plans = [] if plan is None else [jnp.asarray(plan)]

    def with_blocks(run, group, *refs):
        plan_ref = None
        if plans:
            plan_ref, refs = refs[len(inputs)], refs[: len(inputs)] + refs[len(inputs) + 1 :]
        run(Mine(blocks, plan_ref), group, *refs)

    parts = [dataclasses.replace(part, run=functools.partial(with_blocks, part.run)) for part in parts]
    return call_parts(parts, name, dict(program=blocks.programs), [*inputs, *plans], out_shapes, scratch)


def call(work: Work, name, blocks: Blocks, inputs, out_shapes, scratch, *, layout: Groups):
    """Do the work of all blocks, in `layout.groups` computing warp groups and one that copies of each program."""

    def compute(mine, group, *refs):
        mine.compute(
            lambda at: work.fetch(group, at, *refs),
            lambda *block: work.compute(lax.optimization_barrier(group), *block, *refs),
        )

    def copy(mine, _, *refs):
        mine.each(lambda step, base: work.copy(mine.at(step), base, *refs))

    parts = Part(layout.groups, REGISTERS[layout.groups], compute), Part(1, COPY_REGISTERS, copy)
    return stay(parts, name, blocks, inputs, out_shapes, scratch)


def call_parts(parts, name, grid: dict[str, int], inputs, out_shapes, scratch):
    """Run parts side by side in each program of a grid; only the first part may be of several groups."""
    groups = sum(part.groups for part in parts)
    launched = registers_at_launch(groups)

    def kernel(*refs):
        group, first = lax.axis_index("group"), 0
        for part in parts:

            @pl.when(group == first if first else group < part.groups)
            def _(part=part):
                if part.registers is not None:
                    action = "increase" if part.registers > launched else "decrease"
                    plgpu.set_max_registers(part.registers, action=action)
                part.run(group, *refs)

            first += part.groups

    kernel.__name__ = name
    results = plgpu.kernel(
        kernel,
        out_type=out_shapes,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # No group reads shared memory that it writes, but where `write` or `join` orders it.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*inputs)
    return vary_over(varying_axes(inputs), results)


def fold_vmap(launch):
    """launch(*arrays), all [B, ...] as its results; under vmap the mapped axis becomes a part of B.

    For blocks that wait for each other. Pallas would add an axis to the grid, whose calls share one set of counters: a
    block would go on when those of another call have come.
    """
    call = custom_vmap(launch)

    @call.def_vmap
    def _(size, in_batched, *arrays):
        mapped = [
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(arrays, in_batched, strict=True)
        ]
        results = fold_vmap(launch)(*(x.reshape(-1, *x.shape[2:]) for x in mapped))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return call


def registers_at_launch(groups):
    """What each thread of a block of so many warp groups starts with."""
    return 65536 // (128 * groups) // 8 * 8


def program():
    """(batch, head, tile) of this block, of a launch with a program for each."""
    return tuple(lax.axis_index(name) for name in ("batch", "head", "tile"))

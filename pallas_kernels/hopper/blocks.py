"""Which blocks of a launch a program takes, one after another, and in which order.

There are as many programs as the GPU runs at once. Each stays and takes block after block: it fetches what the next one
owns while it finishes one, and its ring of buffers never runs empty (H200, 2026-11-30: 6 microseconds a block).
May be changed: the order. Which program takes a block does not change what it computes.
"""

import dataclasses
import functools
import heapq
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# What a block costs beside its steps, in steps.
START = 1
# How much of the second-level cache the heads may take that are read at the same time: half of an H100's.
CACHE_BYTES = 24 * 2**20
# More blocks are not planned, but dealt one after another: planning takes a second for a million.
MOST_PLANNED = 2**19


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(n for n in range(1, min(most, number) + 1) if number % n == 0)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a launch: for each of batch and heads `len(steps)` tiles, of so many steps each.

    Attributes:
      side: how many heads are gone through together, tile by tile, if there is a plan; it divides those of a team.
      programs: that take them.
      teams: of as many programs, of which each has as many heads to itself. Where blocks of a head wait for each other
        one team must be on the GPU as a whole, not all of them: programs start in their order, and others find room
        when it has finished.
    """

    batch: int
    heads: int
    steps: tuple[int, ...]
    side: int
    programs: int
    teams: int = 1

    @classmethod
    def make(cls, batch: int, heads: int, steps: list[int], streams: Sequence[jax.Array], cores: int):
        """For `cores` multiprocessors; `streams` are the operands that all tiles of a head read."""
        a_head = sum(x.size * x.dtype.itemsize for x in streams) // (batch * heads)
        side = largest_divisor(batch * heads, max(1, CACHE_BYTES // max(a_head, 1)))
        return cls(batch, heads, tuple(steps), side, min(cores, batch * heads * len(steps)))

    @property
    def total(self) -> int:
        return self.batch * self.heads * len(self.steps)

    @property
    def plan(self) -> np.ndarray | None:
        """For each program how many blocks it takes and their numbers, int32; None if it takes every n-th."""
        if (len(set(self.steps)) == 1 and self.teams == 1) or self.total > MOST_PLANNED:
            return None
        return _plan(self)

    def count(self, program, plan_ref):
        """How many blocks a program takes."""
        if plan_ref is None:
            return lax.div(self.total - 1 - program, jnp.int32(self.programs)) + 1
        return plan_ref[program, 0]

    def at(self, program, step, plan_ref):
        """(batch, head, tile) of its block number `step`."""
        tiles = jnp.int32(len(self.steps))
        number = step * self.programs + program if plan_ref is None else plan_ref[program, step + 1]
        head, tile = lax.div(number, tiles), lax.rem(number, tiles)
        return lax.div(head, jnp.int32(self.heads)), lax.rem(head, jnp.int32(self.heads)), tile


@functools.lru_cache(maxsize=64)
def _plan(blocks: Blocks) -> np.ndarray:
    """Each block, in order, goes to the program that has done least: long ones come first, short ones fill the gaps."""
    tiles, side = len(blocks.steps), blocks.side
    taken = [[] for _ in range(blocks.programs)]
    programs, heads = blocks.programs // blocks.teams, blocks.batch * blocks.heads // blocks.teams
    for team in range(blocks.teams):
        free = [(0, team * programs + i) for i in range(programs)]
        for first in range(team * heads, (team + 1) * heads, side):
            for tile in range(tiles):
                for head in range(first, first + side):
                    done, program = heapq.heappop(free)
                    taken[program].append(head * tiles + tile)
                    heapq.heappush(free, (done + blocks.steps[tile] + START, program))
    plan = np.zeros((blocks.programs, 1 + max(map(len, taken))), np.int32)
    for program, numbers in enumerate(taken):
        plan[program, 0] = len(numbers)
        plan[program, 1 : 1 + len(numbers)] = numbers
    return plan

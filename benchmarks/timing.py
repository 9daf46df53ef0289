"""Device time of a JAX function: many calls inside one compiled computation, the host's clock around it.

The calls run in a `fori_loop` with a constant trip count, so the GPU gets them without the host in between; each call's
inputs pass through an optimization barrier together with the results of the call before, so that XLA can neither hoist
work out of the loop nor drop a call. The first execution warms up and is not counted; of the others the median counts,
divided by the number of calls. At the shapes of `cases.py` one input is 64 MiB and all of them exceed the level-2 cache
of any GPU, so every call reads them from memory.
"""

import contextlib
import fcntl
import math
import statistics
import time
from pathlib import Path

import jax
from jax import lax

# A guess of the speed, to choose how many calls make up one execution; being wrong costs time, not truth.
_GUESSED_FLOPS_PER_SECOND = 4e14
_SECONDS_PER_EXECUTION = 0.03
LOCK_HELP = "file; of all runs that are given it one times while others compile; each needs an --output of its own"


def calls_per_execution(flops: float) -> int:
    """So many that the execution's launch from the host, some 0.1 ms, is less than 1% of it."""
    return min(200, max(4, math.ceil(_SECONDS_PER_EXECUTION * _GUESSED_FLOPS_PER_SECOND / flops)))


def repeated(function, calls: int):
    """A function that calls `function` `calls` times on the same inputs, in sequence, and returns the last results."""

    def run(*inputs):
        def body(_, carry):
            inputs, results = carry
            inputs, _ = lax.optimization_barrier((inputs, results))
            return inputs, function(*inputs)

        results = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), jax.eval_shape(function, *inputs))
        return lax.fori_loop(0, calls, body, (inputs, results))[1]

    return run


def compile_repeated(function, inputs, calls: int):
    """`repeated(function, calls)` compiled for these inputs (or their shapes)."""
    return jax.jit(repeated(function, calls)).lower(*inputs).compile()


def time_compiled(compiled, inputs, calls: int, executions: int = 7):
    """Median seconds of one call, and the results of the first execution."""
    results = jax.block_until_ready(compiled(*inputs))
    return statistics.median(_execution_times(compiled, inputs, executions)) / calls, results


def _execution_times(compiled, inputs, executions):
    """Seconds of each execution, results discarded at once."""
    times = []
    for _ in range(executions):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        times.append(time.perf_counter() - start)
    return times


@contextlib.contextmanager
def alone(lock: Path | None):
    """While this runs nobody else who was given this file does: programs that compile side by side time one by one."""
    if lock is None:
        yield
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

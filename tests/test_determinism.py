"""Bitwise repeatable, forward and backward, and independent of the rest of the batch."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_bitwise, forward_and_backward, make_inputs

from sagebwd_jax import SageConfig


def test_repeats_bitwise(implementation):
    inputs = make_inputs(200, 150, dtype=jnp.bfloat16)
    run = forward_and_backward(implementation, is_causal=True)
    first = run(*inputs)
    for _ in range(3):
        assert_bitwise(run(*inputs), first)


def test_compiled_again_repeats_bitwise(implementation):
    inputs = make_inputs(130, 130, depth=32)
    first, second = (forward_and_backward(implementation)(*inputs) for _ in range(2))
    assert_bitwise(second, first)


@pytest.mark.parametrize("config", [SageConfig(), SageConfig.mixed()], ids=["default", "mixed"])
def test_does_not_depend_on_the_rest_of_the_batch(implementation, config):
    inputs = make_inputs(130, 140, batch=3, depth=32)
    run = forward_and_backward(implementation, is_causal=True, config=config)
    one_of_three = [x[1:2] for x in run(*inputs)]
    others = [x.at[jnp.array([0, 2])].multiply(17).at[2].set(0) for x in inputs]
    assert_bitwise([x[1:2] for x in run(*others)], one_of_three)
    if implementation != "xla":
        # What is compiled for another batch size may sum in another order in XLA, but not in a kernel.
        assert_bitwise(list(run(*(x[1:2] for x in inputs))), one_of_three)


def test_does_not_depend_on_other_heads(implementation):
    q, k, v, dout = make_inputs(130, 140, heads=6, kv_heads=3, depth=32)
    run = forward_and_backward(implementation)
    plain = run(q, k, v, dout)
    changed = run(*(x.at[:, :, heads:].multiply(9) for x, heads in zip((q, k, v, dout), (2, 1, 1, 2), strict=True)))
    for name, heads in dict(out=2, lse=2, dq=2, dk=1, dv=1).items():
        assert_bitwise(getattr(changed, name)[:, :, :heads], getattr(plain, name)[:, :, :heads])


def test_equal_batches_have_equal_results(implementation):
    inputs = [jnp.concatenate([x, x]) for x in make_inputs(130, 140, batch=1, depth=32)]
    for x in forward_and_backward(implementation)(*inputs):
        assert_bitwise(x[0], x[1])


def digest_of_thirty_runs(implementation):
    """One digest of what 30 runs of a long causal call with grouped heads return alike."""
    wide = dict(batch=2, heads=8, kv_heads=2, depth=128) if implementation == "triton" else dict(depth=32, batch=1)
    inputs = make_inputs(4096, 4096, **(dict(heads=2, kv_heads=1, dtype=jnp.bfloat16) | wide))
    run = forward_and_backward(implementation, is_causal=True)
    first = jax.device_get(run(*inputs))
    for _ in range(29):
        assert_bitwise(jax.device_get(run(*inputs)), first)
    return hashlib.sha256(b"".join(x.tobytes() for x in first)).hexdigest()


@pytest.mark.parametrize(
    "implementation", [pytest.param("xla", marks=pytest.mark.slow), pytest.param("triton", marks=pytest.mark.gpu)]
)
def test_thirty_runs_in_two_processes(implementation):
    tests = Path(__file__).parent
    # On a GPU this process may hold three quarters of the memory.
    environment = os.environ | dict(PYTHONPATH=f"{tests}:{tests.parent}", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    program = f"import test_determinism; print(test_determinism.digest_of_thirty_runs({implementation!r}))"
    command = [sys.executable, "-c", program]
    first, second = (
        subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout for _ in range(2)
    )
    assert first and first == second

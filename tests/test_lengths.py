"""Lengths that no tile divides, first calls of a process, and more rows than plain JAX holds scores of at a time."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import (
    as_float64,
    assert_bitwise,
    assert_usable,
    assert_within,
    attend_and_grads,
    exact,
    forward_and_backward,
    make_inputs,
    normal,
    oracle,
)

from sagebwd_jax import _xla

LENGTHS = (1, 2, 7, 17, 63, 65, 127, 129, 192, 1000, 4092)
# What takes seconds anywhere; the others are slow, and Pallas' interpreter takes minutes for the longest.
QUICK = {"xla": LENGTHS[:-1], "triton-interpreted": (7, 65, 129)}
CALLS = [
    pytest.param(name, length, marks=[] if length in QUICK[name] else [pytest.mark.slow])
    for name in QUICK
    for length in LENGTHS
    if name == "xla" or length <= 192
] + [pytest.param("triton", length, marks=pytest.mark.gpu) for length in LENGTHS]


def check(implementation, length, is_causal):
    """Ten calls give the same bits, the first of them too, and are close to exact attention."""
    inputs = make_inputs(length, length, batch=1, heads=4, kv_heads=4, depth=32, dtype=jnp.bfloat16, seed=length)
    run = forward_and_backward(implementation, is_causal=is_causal)
    results = [jax.device_get(run(*inputs)) for _ in range(10)]
    for later in results[1:]:
        assert_bitwise(later, results[0])
    got, expected = results[0], exact(*inputs, is_causal=is_causal)
    if length > 1:
        assert_usable(got, expected)
        return
    assert_within(got, expected, out=0.03, dv=0.08)
    assert not as_float64(got.dq).any() and not as_float64(got.dk).any()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("implementation", "length"), CALLS)
def test_ten_calls_of_any_length(implementation, length, is_causal):
    check(implementation, length, is_causal)


FRESH = [
    pytest.param(name, length, marks=[pytest.mark.gpu if name == "triton" else pytest.mark.slow])
    for name in ("xla", "triton")
    for length in LENGTHS
]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("implementation", "length"), FRESH)
def test_first_calls_of_a_process(implementation, length, is_causal):
    tests = Path(__file__).parent
    # On a GPU this process may hold three quarters of the memory.
    environment = os.environ | dict(PYTHONPATH=f"{tests}:{tests.parent}", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    program = f"import test_lengths; test_lengths.check({implementation!r}, {length}, {is_causal})"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestMoreRowsThanAtOnce:
    """Plain JAX takes _ROWS queries or keys at a time, and where they do not divide the length some of them twice."""

    QUERIES, KEYS = _xla._ROWS + 52, _xla._ROWS + 152

    def test_equal_the_dense_algorithm(self):
        inputs = make_inputs(self.QUERIES, self.KEYS, batch=1, heads=1, kv_heads=1, depth=32)
        got = forward_and_backward("xla", is_causal=True)(*inputs)
        assert_within(got, oracle(*inputs, is_causal=True), out=3e-4, lse=1e-5, dq=3e-3, dk=3e-3, dv=3e-3)

    @pytest.mark.parametrize("options", ["segments", "bias"])
    def test_with_masks(self, options):
        queries, keys = (jnp.arange(n)[None] // 700 for n in (self.QUERIES, self.KEYS))
        options = {
            "segments": dict(query_segment_ids=queries, key_value_segment_ids=keys, local_window_size=300),
            "bias": dict(
                bias=normal(5, 1, 2, self.QUERIES, 1),
                mask=normal(6, 1, 1, self.QUERIES, self.KEYS) > -0.5,
                key_value_seq_lengths=jnp.array([self.KEYS - 60]),
            ),
        }[options]
        inputs = make_inputs(self.QUERIES, self.KEYS, batch=1, heads=2, kv_heads=1, depth=32)
        assert_usable(attend_and_grads("xla", *inputs, **options), exact(*inputs, **options))

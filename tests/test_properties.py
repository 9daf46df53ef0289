"""Any shape, dtype, grouping, mask and bias: as close to exact attention as quantisation allows."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    as_float64,
    assert_cosines,
    assert_finite,
    assert_usable,
    attend_and_grads,
    exact,
    forward_and_backward,
    make_inputs,
    normal,
)

from sagebwd_jax import SageConfig
from sagebwd_jax.reference import visible_scores

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

# Each example compiles, so they are few; derandomised, so that a failure is everyone's.
settings = dict(deadline=None, derandomize=True, database=None)
# Nor is a failure shrunk, which would compile hundreds.
unshrunk = dict(
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
few = hypothesis.settings(max_examples=8, **settings)
CONFIGS = [SageConfig(), SageConfig.faithful(), SageConfig.mixed(), SageConfig.precise()]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
B = 2


@few
@hypothesis.given(
    queries=st.integers(2, 200),
    keys=st.integers(2, 200),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    depth=st.integers(4, 128),
    dtype=st.sampled_from(DTYPES),
    is_causal=st.booleans(),
    config=st.sampled_from(CONFIGS),
    seed=st.integers(0, 99),
)
def test_close_to_exact_attention(queries, keys, kv_heads, group, depth, dtype, is_causal, config, seed):
    inputs = make_inputs(
        queries, keys, batch=2, heads=group * kv_heads, kv_heads=kv_heads, depth=depth, dtype=dtype, seed=seed
    )
    got = forward_and_backward("xla", is_causal=is_causal, config=config)(*inputs)
    assert_usable(got, exact(*inputs, is_causal=is_causal))


@few
@hypothesis.given(
    exponents=st.tuples(*[st.integers(-20, 3)] * 2, *[st.integers(-20, 20)] * 2),
    offset=st.floats(-50, 50),
    is_causal=st.booleans(),
)
def test_any_size_of_the_inputs(exponents, offset, is_causal):
    # One shape, so that it compiles twice.
    q, k, v, dout = (x * 2.0**e for x, e in zip(make_inputs(66, 70, depth=32), exponents, strict=True))
    inputs = q, k + offset * 2.0 ** exponents[1], v, dout
    got, expected = RUN[is_causal](*inputs), exact(*inputs, is_causal=is_causal)
    assert_finite(got)
    assert_cosines(got, expected, out=0.99, dv=0.99)


RUN = {is_causal: forward_and_backward("xla", is_causal=is_causal) for is_causal in (False, True)}


AXES = [axes for rank in range(5) for axes in itertools.product((False, True), repeat=rank)]


def scores_operand(draw, full, make):
    """None, or `make` of a shape that broadcasts to `full`, of any rank."""
    axes = draw(st.sampled_from([None] * 10 + AXES))
    if axes is None:
        return None
    last = full[4 - len(axes) :]
    return make([size if is_axis else 1 for size, is_axis in zip(last, axes, strict=True)])


def tokens(draw, seed, time):
    """Ids of packed documents [B, time], in order or in any."""
    ids = np.random.default_rng(seed).integers(-1, draw(st.integers(1, 4)), (B, time))
    return jnp.array(np.sort(ids) if draw(st.booleans()) else ids, jnp.int32)


@dataclasses.dataclass(frozen=True, repr=False)
class Call:
    """query, key, value, dout, the options that are given, and the config; shown without what arrays hold."""

    inputs: list
    options: dict
    config: SageConfig

    def __repr__(self):
        def short(x):
            return (
                f"{x.dtype.name}{list(x.shape)}" if getattr(x, "size", 0) > B or getattr(x, "ndim", 0) > 1 else str(x)
            )

        options = ", ".join(f"{name}={short(x)}" for name, x in self.options.items())
        return f"Call({', '.join(map(short, self.inputs[:2]))}, {options}, {self.config})"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


@st.composite
def calls(draw, longest, deepest):
    """A call with any of the arguments."""
    queries, keys = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    kv_heads, group, seed = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3])), draw(st.integers(0, 99))
    heads, rng = group * kv_heads, np.random.default_rng(seed)
    sizes = dict(batch=B, heads=heads, kv_heads=kv_heads, depth=draw(st.integers(1, deepest)), seed=seed)
    inputs = make_inputs(queries, keys, **sizes, dtype=draw(st.sampled_from(DTYPES)))
    full = B, heads, queries, keys

    def mask(shape):
        # Few heads and sequences without any key.
        shares = [0.9, 0.5, 0.02] if math.prod(shape) > B * heads else [0.9]
        counts = rng.random(shape) < draw(st.sampled_from(shares))
        if len(shape) > 1 and shape[-2] > 1 and draw(st.booleans()):
            counts[..., :: draw(st.integers(1, 9)), :] = False
        return jnp.array(counts)

    def bias(shape):
        x = normal(seed, *shape, dtype=draw(st.sampled_from(DTYPES)))
        return jnp.where(jnp.array(rng.random(shape) < draw(st.sampled_from([0, 0.3]))), -jnp.inf, x)

    # Few keys show one too many or too few.
    side = st.integers(0, 20) | st.integers(0, longest)
    options = dict(
        is_causal=draw(st.booleans()),
        local_window_size=draw(st.none() | side | st.tuples(side, side)),
        mask=scores_operand(draw, full, mask),
        bias=scores_operand(draw, full, bias),
    )
    for name, time in (("query_seq_lengths", queries), ("key_value_seq_lengths", keys)):
        lengths = draw(st.none() | st.tuples(*[st.integers(0, time)] * B))
        options[name] = None if lengths is None else jnp.array(lengths, jnp.int32)
    if draw(st.booleans()):
        options["query_segment_ids"] = tokens(draw, seed, queries)
        options["key_value_segment_ids"] = tokens(draw, seed + 1, keys)
    given = {name: x for name, x in options.items() if x is not None}
    return Call(inputs, given, draw(st.sampled_from(CONFIGS)))


def check_call(implementation, call):
    """Where exact attention says nothing flows nothing does; elsewhere the results are near."""
    inputs, options = call.inputs, call.options
    query, key, *_ = inputs
    got = attend_and_grads(implementation, *inputs, **options, config=call.config)
    expected = exact(*inputs, **options)
    seen = np.asarray(visible_scores(query, key, **options))
    seen = np.broadcast_to(seen, (B, query.shape[2], *seen.shape[2:]))
    sees, is_seen = seen.any(3).swapaxes(1, 2), seen.any(2).reshape(B, key.shape[2], -1, key.shape[1])
    is_seen = is_seen.any(2).swapaxes(1, 2)
    assert ((got.lse == -jnp.inf) == ~sees).all() and ((expected.lse == -jnp.inf) == ~sees).all()
    for name, flows in dict(out=sees, dq=sees, dk=is_seen, dv=is_seen).items():
        assert not as_float64(getattr(got, name))[~flows].any(), name
    if got.dbias is not None:
        assert got.dbias.dtype == options["bias"].dtype
        shape = (1,) * (4 - got.dbias.ndim) + got.dbias.shape
        flows = seen.any(tuple(axis for axis in range(4) if shape[axis] == 1), keepdims=True)
        assert not as_float64(got.dbias).reshape(shape)[~flows].any()
    parts = parts_of_bounds(got, expected, sees, inputs)
    # Written so that NaN fails.
    assert all(part <= 1 for part in parts.values()), parts
    return parts


def parts_of_bounds(got, expected, sees, inputs):
    """Each tensor's error as a part of what is allowed.

    That is a part of the tensor itself, and a smaller one of what it would be if nothing in it cancelled: a gradient of
    few keys is the small difference dP - delta of two numbers that are each quantised, and its error theirs.
    """
    q, k, v, dout = (np.linalg.norm(as_float64(x), axis=-1) for x in inputs)
    depth, rows, cotangent = inputs[0].shape[-1], np.sqrt(sees.sum()), np.linalg.norm(dout * sees)
    ds, scale = v.max() * cotangent / np.sqrt(depth), 1 / np.sqrt(depth)
    # name: part of the tensor, part of the size, size.
    allowed = dict(
        out=(0.02, 0.003, v.max() * rows),
        lse=(0.0, 0.01, q.max() * k.max() / depth * rows),
        dq=(0.05, 0.005, scale * k.max() * ds),
        dk=(0.05, 0.005, scale * q.max() * ds),
        dv=(0.05, 0.005, cotangent),
        dbias=(0.05, 0.005, ds),
    )
    parts = {}
    for name, (relative, part, size) in allowed.items():
        x, like = getattr(got, name), getattr(expected, name)
        if x is not None:
            x, like = (np.where(sees, y, 0) if name == "lse" else as_float64(y) for y in (x, like))
            error = np.linalg.norm(x - like)
            parts[name] = error / (relative * np.linalg.norm(like) + part * size) if error else 0.0
    return parts


# Examples, the longest sequence and the deepest head.
SIZES = {"xla": (8, 200, 128), "triton-interpreted": (6, 140, 64), "triton": (12, 200, 128)}


def check_calls(implementation, examples, longest, deepest):
    @hypothesis.settings(max_examples=examples, **settings, **unshrunk)
    @hypothesis.given(calls(longest, deepest))
    def check(call):
        check_call(implementation, call)

    check()


def test_any_call_is_close_to_exact_attention(implementation):
    check_calls(implementation, *SIZES[implementation])


@pytest.mark.slow
def test_any_call_is_close_to_exact_attention_often(cpu_implementation):
    _, longest, deepest = SIZES[cpu_implementation]
    check_calls(cpu_implementation, 30, longest, deepest)

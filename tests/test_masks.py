"""Masks, lengths and windows: each implementation computes the quantised algorithm under every combination of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bitwise,
    assert_finite,
    assert_usable,
    assert_within,
    attend_and_grads,
    exact,
    make_inputs,
    normal,
    oracle,
    relative_error,
    using,
    without_empty_rows,
)

from sagebwd_jax import SageConfig, _masks, attention

# As in test_against_oracle.py: sums in another order.
BOUNDS = {
    "float32": dict(out=3e-4, lse=1e-5, dq=3e-3, dk=3e-3, dv=3e-3, dbias=1e-3),
    "bfloat16": dict(out=4e-3, lse=1e-4, dq=5e-3, dk=5e-3, dv=5e-3, dbias=4e-3),
}
B = 2


def random_mask(seed, *shape, share=0.6):
    return jax.random.bernoulli(jax.random.key(seed), share, shape)


def segments(seed, time, documents=3, first=0):
    """Packed documents [B, time] of random lengths."""
    return jnp.sort(jax.random.randint(jax.random.key(seed), (B, time), first, first + documents), axis=1)


def lengths(*values):
    return jnp.array(values, jnp.int32)


# name: queries, keys, heads, depth, dtype, causal, config, the other arguments (a function, as tracing makes arrays)
CASES = {
    "window": (257, 257, (4, 2), 64, "float32", False, SageConfig(), lambda: dict(local_window_size=(40, 10))),
    "window-causal-faithful": (
        193,
        257,
        (2, 2),
        32,
        "bfloat16",
        True,
        SageConfig.faithful(),
        lambda: dict(local_window_size=50),
    ),
    "lengths": (
        130,
        257,
        (4, 2),
        32,
        "float32",
        False,
        SageConfig(),
        lambda: dict(query_seq_lengths=lengths(130, 70), key_value_seq_lengths=lengths(33, 250)),
    ),
    "segments-causal-mixed": (
        200,
        200,
        (4, 2),
        64,
        "bfloat16",
        True,
        SageConfig.mixed(),
        lambda: dict(query_segment_ids=segments(1, 200), key_value_segment_ids=segments(1, 200)),
    ),
    "mask-precise": (
        130,
        150,
        (2, 1),
        32,
        "float32",
        False,
        SageConfig.precise(),
        lambda: dict(mask=random_mask(2, B, 1, 130, 150).at[0, 0, 7].set(False)),
    ),
    "mask-of-heads-and-keys": (
        129,
        300,
        (4, 2),
        32,
        "float32",
        False,
        SageConfig(key_scale="token"),
        lambda: dict(mask=random_mask(3, 1, 4, 1, 300)),
    ),
    "mask-of-heads-and-queries": (
        140,
        66,
        (4, 2),
        32,
        "float32",
        False,
        SageConfig(),
        lambda: dict(mask=random_mask(3, 4, 140, 1)),
    ),
    "key-padding-mask": (
        66,
        140,
        (2, 1),
        32,
        "float32",
        False,
        SageConfig(),
        lambda: dict(mask=random_mask(4, B, 1, 1, 140)),
    ),
    "bias": (
        130,
        200,
        (4, 2),
        32,
        "bfloat16",
        False,
        SageConfig(),
        lambda: dict(bias=normal(5, 1, 4, 130, 200)),
    ),
    # The tile whose absolute maximum is shared is the config's, whatever a kernel with a bias would rather own.
    "bias-faithful": (
        130,
        200,
        (2, 1),
        64,
        "float32",
        False,
        SageConfig.faithful(),
        lambda: dict(bias=normal(5, 1, 2, 130, 200)),
    ),
    "segments-faithful": (
        150,
        150,
        (2, 1),
        128,
        "float32",
        False,
        SageConfig.faithful(),
        lambda: dict(query_segment_ids=segments(1, 150), key_value_segment_ids=segments(1, 150)),
    ),
    "everything": (
        257,
        257,
        (4, 2),
        32,
        "float32",
        True,
        SageConfig(),
        lambda: dict(
            bias=normal(6, B, 4, 257, 257),
            mask=random_mask(7, B, 1, 257, 257, share=0.8),
            local_window_size=(150, 60),
            query_segment_ids=segments(1, 257),
            key_value_segment_ids=segments(1, 257),
            key_value_seq_lengths=lengths(250, 140),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_algorithm(implementation, name):
    queries, keys, heads, depth, dtype, is_causal, config, make = CASES[name]
    inputs = make_inputs(queries, keys, batch=B, heads=heads[0], kv_heads=heads[1], depth=depth, dtype=jnp.dtype(dtype))
    # A common component of the keys, as in trained models: without it nothing shows that smoothing is done right.
    inputs[1] = inputs[1].at[..., 1].add(1.5)
    options = make() | dict(is_causal=is_causal, config=config)
    got, expected = attend_and_grads(implementation, *inputs, **options), oracle(*inputs, **options)
    for x, like in zip(got, [inputs[0], None, *inputs[:3], options.get("bias")], strict=True):
        assert x is like is None or x.dtype == (jnp.float32 if like is None else like.dtype)
    assert ((got.lse == -jnp.inf) == (expected.lse == -jnp.inf)).all()
    bounds = {field: bound for field, bound in BOUNDS[dtype].items() if getattr(got, field) is not None}
    assert_within(without_empty_rows(got), without_empty_rows(expected), **bounds)
    empty = got.lse == -jnp.inf
    assert not got.out[empty].any() and not got.dq[empty].any()


@pytest.mark.parametrize(
    ("shape", "implementation"),
    [
        *((shape, "triton-interpreted") for shape in ((2, 1, 1, 70), (1, 1, 66, 70), (2, 4, 66, 70), (1, 4, 1, 70))),
        ((2, 1, 66, 1), "xla"),
        ((1, 4, 1, 70), "xla"),
        *(
            pytest.param(shape, "triton", marks=pytest.mark.gpu)
            for shape in ((2, 1, 1, 70), (1, 1, 66, 70), (2, 4, 66, 70), (1, 4, 1, 70), (2, 1, 66, 1))
        ),
    ],
    ids=str,
    indirect=["implementation"],
)
def test_masks_broadcast_as_in_jax(implementation, shape):
    # C28.
    q, k, v, _ = make_inputs(66, 70, heads=4, kv_heads=2, depth=16)
    mask = random_mask(8, *shape)
    mask = mask if shape[3] == 1 else mask.at[..., 0].set(True)
    with using(implementation) as name:
        got, lse = attention(q, k, v, mask=mask, implementation=name, return_residual=True)
    theirs = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")
    sees = (lse > -jnp.inf)[..., None]
    assert relative_error(got, jnp.where(sees, theirs, 0)) <= 0.03


def test_a_row_that_sees_nothing(implementation):
    # C24: neither it nor its cotangent, whatever that is, reaches anything else.
    q, k, v, dout = make_inputs(64, 64, heads=2, kv_heads=2, depth=16)
    mask = jnp.ones((2, 1, 64, 64), bool).at[1, 0, 7].set(False)
    got = attend_and_grads(implementation, q, k, v, dout.at[1, 7].set(jnp.nan), mask=mask)
    assert_finite(got, ("out", "dq", "dk", "dv"))
    assert not got.out[1, 7].any() and not got.dq[1, 7].any() and (got.lse[1, 7] == -jnp.inf).all()
    assert_usable(got, exact(q, k, v, dout, mask=mask))
    # The same sequence without that row, by its own.
    assert jnp.isfinite(got.lse.at[1, 7].set(0)).all()


def test_a_sequence_without_keys(implementation):
    # C24, by lengths.
    inputs = make_inputs(64, 64, heads=2, kv_heads=2, depth=16)
    inputs[1] = inputs[1].at[1].set(jnp.nan)
    got = attend_and_grads(implementation, *inputs, key_value_seq_lengths=lengths(64, 0))
    for x in (got.out, got.dq, got.dk, got.dv):
        assert not x[1].any() and jnp.isfinite(x).all() and x[0].any()
    assert (got.lse[1] == -jnp.inf).all()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("x64", "make", "kind", "values"),
    [
        (True, jnp.asarray, "int64", [2**32 + 3, 2**63 - 1, -(2**32) + 3, 7, 0]),
        (True, jnp.asarray, "uint64", [2**32 + 3, 2**64 - 1, 2**63, 7, 0]),
        (False, jnp.asarray, "uint32", [2**32 - 1, 2**31, 20, 7, 0]),
        (False, jnp.asarray, "int32", [2**31 - 1, -(2**31), -1, 7, 0]),
        (False, jnp.asarray, "int8", [127, -128, -1, 7, 0]),
        (False, np.asarray, "int64", [2**32 + 3, 2**63 - 1, -(2**32) + 3, 7, 0]),
        (False, np.asarray, "uint64", [2**32 + 3, 2**64 - 1, 2**63, 7, 0]),
    ],
    ids=lambda x: x.__module__.split(".")[0] if callable(x) else "" if isinstance(x, list) else str(x),
)
def test_lengths_of_any_integers(x64, make, kind, values, jit):
    # Below 0 is 0, above T or S is all.
    with jax.enable_x64(x64):
        given = make(np.array(values, kind))

        def count(x=given):
            sizes = _masks.Sizes(batch=5, queries=20, keys=20, heads=1, batched=True)
            return _masks._within(_masks._check_lengths("name", x, 20, sizes), 20).sum(1)

        got = count() if not jit else jax.jit(count)() if make is np.asarray else jax.jit(count)(given)
    assert got.tolist() == [min(max(x, 0), 20) for x in values]


def test_long_lengths_are_all():
    q, k, v, _ = make_inputs(20, 20, heads=1, kv_heads=1, depth=16)
    call = functools.partial(attention, q, k, v, implementation="xla")
    for wide in (np.array([2**32 + 3, 7]), np.array([2**32 - 1, 7], np.uint32), jnp.array([2**32 - 1, 7], jnp.uint32)):
        assert_bitwise(call(key_value_seq_lengths=wide), call(key_value_seq_lengths=lengths(20, 7)))
    alone = functools.partial(attention, q[0], k[0], v[0], implementation="xla")
    assert_bitwise(alone(key_value_seq_lengths=2**40 + 3), alone(key_value_seq_lengths=20))


@pytest.mark.parametrize(("queries", "keys", "window", "is_causal"), [(9, 9, (2, 1), False), (5, 12, 3, True)])
def test_weights_outside_of_the_window_are_zero(implementation, queries, keys, window, is_causal):
    # C19: values that are one-hot show the weights.
    q, k, _, dout = make_inputs(queries, keys, heads=2, kv_heads=2, depth=16)
    v = jnp.broadcast_to(jnp.eye(keys, 16)[None, :, None], k.shape)
    got = attend_and_grads(implementation, q, k, v, dout, local_window_size=window, is_causal=is_causal)
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    left, right = window if isinstance(window, tuple) else (window, window)
    seen = (i - left <= j) & (j <= (i if is_causal else i + right))
    weights = got.out[..., :keys].swapaxes(1, 2)
    assert (jnp.where(seen, 0, weights) == 0).all()
    assert (jnp.where(seen, weights, 1) > 1e-3).all()
    hidden = ~seen.any(0)
    assert not got.dk[:, hidden].any() and not got.dv[:, hidden].any()


def test_a_window_that_limits_nothing_is_a_plain_call():
    q, k, v, _ = make_inputs(20, 30, depth=16)

    def trace(**options):
        return str(jax.make_jaxpr(lambda *x: attention(*x, implementation="xla", **options))(q, k, v))

    assert trace(local_window_size=(19, 29)) == trace()
    assert trace(local_window_size=(18, 29)) != trace()


OPTIONS = {
    "bias": lambda: dict(bias=normal(3, 1, 1, 66, 66)),
    "mask": lambda: dict(mask=random_mask(3, 1, 1, 66, 66)),
    "query_seq_lengths": lambda: dict(query_seq_lengths=lengths(30, 66)),
    "key_value_seq_lengths": lambda: dict(key_value_seq_lengths=lengths(30, 66)),
    "local_window_size": lambda: dict(local_window_size=3),
    "segment_ids": lambda: dict(query_segment_ids=segments(1, 66)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_dropped(name):
    # C27: also without a gradient or log-sum-exp, and without jit.
    q, k, v, _ = make_inputs(66, 66, heads=2, kv_heads=2, depth=16)
    plain = attention(q, k, v, implementation="xla")
    options = OPTIONS[name]()
    got = attention(q, k, v, implementation="xla", **options)
    if name == "segment_ids":
        options |= dict(key_value_segment_ids=options["query_segment_ids"])
    assert relative_error(got, exact(q, k, v, v, **options).out) <= 0.03
    assert relative_error(got, plain) > 0.1


def test_unbatched():
    inputs = make_inputs(66, 70, batch=1, heads=2, kv_heads=1, depth=16)
    options = dict(mask=random_mask(3, 66, 70), key_value_seq_lengths=lengths(60))
    call = functools.partial(attention, implementation="xla", return_residual=True, **options)
    out, lse = call(*(x[0] for x in inputs[:3]))
    assert out.shape == (66, 2, 16) and lse.shape == (66, 2)
    assert_bitwise([out[None], lse[None]], call(*inputs[:3]))


def test_does_not_depend_on_the_rest_of_the_batch(implementation):
    inputs = make_inputs(66, 70, batch=3, heads=2, kv_heads=1, depth=16)
    ids = jnp.array([[0] * 60 + [1] * 6, [1] * 33 + [5] * 33, [2] * 66])
    key_ids = jnp.pad(ids, ((0, 0), (0, 4)), constant_values=5)
    mask = random_mask(3, 3, 1, 66, 70)

    def middle(inputs, ids, key_ids, mask, b=1):
        got = attend_and_grads(implementation, *inputs, query_segment_ids=ids, key_value_segment_ids=key_ids, mask=mask)
        return [x[b : b + 1] for x in got if x is not None]

    first = middle(inputs, ids, key_ids, mask)
    outer = jnp.array([0, 2])
    others = [x.at[outer].multiply(17) for x in inputs]
    assert_bitwise(middle(others, ids.at[outer].add(3), key_ids.at[outer].set(3), ~mask.at[1].set(~mask[1])), first)
    if implementation == "triton":
        # What is compiled for another batch size may sum in another order in XLA, but not in a kernel.
        alone = [x[1:2] for x in inputs]
        assert_bitwise(middle(alone, ids[1:2], key_ids[1:2], mask[1:2], b=0), first)


@pytest.mark.parametrize("with_bias", [False, True])
def test_integers_and_booleans_have_gradients_of_float0(with_bias):
    q, k, v, dout = make_inputs(66, 66, heads=2, kv_heads=2, depth=16)
    bias = normal(3, 1, 2, 66, 66) if with_bias else None
    ids = segments(1, 66)
    masks = dict(
        mask=random_mask(3, B, 1, 66, 66),
        query_seq_lengths=lengths(66, 60),
        key_value_seq_lengths=lengths(60, 66),
        query_segment_ids=ids,
        key_value_segment_ids=ids,
    )

    def call(query, bias, masks):
        return attention(query, k, v, bias, implementation="xla", **masks)

    by_vjp = jax.eval_shape(lambda *x: jax.vjp(call, *x)[1](dout), q, bias, masks)
    by_grad = jax.eval_shape(jax.grad(lambda *x: call(*x).sum(), (0, 1, 2), allow_int=True), q, bias, masks)
    wanted = {name: (x.shape, jax.dtypes.float0) for name, x in masks.items()}
    for dq, dbias, dmasks in (by_vjp, by_grad):
        assert {name: (x.shape, x.dtype) for name, x in dmasks.items()} == wanted
        assert dq.shape == q.shape and (dbias is bias is None or dbias.shape == bias.shape)


@pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param("triton-interpreted", marks=pytest.mark.slow),
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
def test_vmap_and_checkpoint(implementation):
    # One call over all against one for each, and the backward pass from what a checkpoint keeps.
    q, k, v, dout = (x.reshape(2, 2, *x.shape[1:]) for x in make_inputs(66, 66, batch=4, heads=2, kv_heads=1, depth=16))
    mask, ids = random_mask(3, 2, 1, 1, 66, 66), jnp.arange(66)[None, :] // jnp.array([30, 40])[:, None]
    ids = jnp.broadcast_to(ids[:, None], (2, 2, 66))

    def grads(mask, ids, *inputs):
        with using(implementation) as name:

            @jax.checkpoint
            def call(*x):
                return attention(*x, mask=mask, query_segment_ids=ids, local_window_size=20, implementation=name)

            out, vjp = jax.vjp(call, *inputs[:3])
            return out, *vjp(inputs[3])

    every = jax.jit(jax.vmap(grads))(mask, ids, q, k, v, dout)
    one = jax.jit(grads)
    for b in range(2):
        for x, y in zip(every, one(mask[b], ids[b], q[b], k[b], v[b], dout[b]), strict=True):
            assert relative_error(x[b], y) <= 1e-6


def test_no_operand_holds_all_scores(cpu_implementation):
    # Memory is O(T) but for a mask or bias that the user passes; where a window and documents limit what is seen.
    time = 2048
    q, k, v, _ = (
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in jax.eval_shape(lambda: make_inputs(time, time, batch=1, heads=2, kv_heads=1, depth=16))
    )
    ids = jax.ShapeDtypeStruct((1, time), jnp.int32)

    def loss(q, k, v, ids):
        with using(cpu_implementation) as name:
            options = dict(query_segment_ids=ids, local_window_size=(300, 0), implementation=name)
            return attention(q, k, v, **options).sum()

    def shapes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (getattr(x.aval, "shape", ()) for x in eqn.outvars)
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from shapes(inner)

    found = list(shapes(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v, ids).jaxpr))
    assert len(found) > 100
    assert not [shape for shape in found if list(shape).count(time) > 1]

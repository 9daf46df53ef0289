"""Packed documents and padding: each document is by itself, to the accuracy of quantisation, and padding is nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bitwise,
    assert_usable,
    assert_within,
    attend_and_grads,
    exact,
    make_inputs,
    normal,
    relative_error,
)

from sagebwd_jax import _masks, _segments, attention
from sagebwd_jax.reference import Attended

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
few = hypothesis.settings(max_examples=30, deadline=None, derandomize=True, database=None)


def rows(attended, b, queries, keys):
    """One batch entry's results for some queries and keys."""
    out, lse, dq = (x[b : b + 1, queries] for x in (attended.out, attended.lse, attended.dq))
    return Attended(out, lse, dq, *(x[b : b + 1, keys] for x in (attended.dk, attended.dv)))


def test_padding_is_neither_read_nor_given_a_gradient(implementation):
    # C25.
    lengths = [24, 125, 128, 1]
    inputs = make_inputs(128, 128, batch=4, heads=2, kv_heads=1, depth=32, dtype=jnp.bfloat16)
    counts = (jnp.arange(128)[None, :] < jnp.array(lengths)[:, None])[:, :, None, None]
    q, k, v, dout = inputs

    def run(fill):
        filled = (jnp.where(counts, x, jnp.asarray(fill, x.dtype)) for x in (k, v))
        return attend_and_grads(implementation, q, *filled, dout, key_value_seq_lengths=jnp.array(lengths))

    got = run(1e4)
    for b, length in enumerate(lengths):
        assert not got.dk[b, length:].any() and not got.dv[b, length:].any()
        alone = exact(q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], dout[b : b + 1])
        if length > 1:
            assert_usable(rows(got, b, slice(None), slice(length)), alone)
        else:
            # One key: P is 1 and dQ, dK are 0.
            assert_within(rows(got, b, slice(None), slice(length)), alone, out=0.03, dv=0.08)
            assert max(jnp.abs(x[b].astype(jnp.float32)).max() for x in (got.dq, got.dk)) <= 1e-3
    assert_bitwise([x for x in run(jnp.nan) if x is not None], [x for x in got if x is not None])


def test_padding_of_queries_is_not_read(implementation):
    inputs = make_inputs(66, 40, heads=2, kv_heads=1, depth=16)
    lengths = jnp.array([50, 66])

    def run(fill):
        q, k, v, dout = inputs
        q, dout = (x.at[0, 50:].set(fill) for x in (q, dout))
        got = attend_and_grads(implementation, q, k, v, dout, query_seq_lengths=lengths)
        return [x for x in got if x is not None]

    first = run(jnp.nan)
    assert not first[0][0, 50:].any() and not first[2][0, 50:].any()
    assert_bitwise(run(7.0), first)


# What the first document's keys and values are times, and what is added to its values: no scale of it may reach the
# second, which begins in the middle of a block.
@pytest.mark.parametrize(("keys", "values", "shift"), [(1, 1, 0), (100, 1, 0), (1, 100, 0), (1, 1, 100)])
def test_a_document_does_not_notice_another(implementation, keys, values, shift):
    # Keys of the two have different large means, which one mean for both would not take away.
    q, k, v, dout = make_inputs(200, 200, batch=1, heads=4, kv_heads=2, depth=32)
    k = k.at[:, :90, :, 3].add(60.0).at[:, 90:, :, 3].add(-60.0)
    k, v = k.at[:, :90].multiply(keys), v.at[:, :90].multiply(values).at[:, :90].add(shift)
    second = slice(90, 200)
    ids = jnp.where(jnp.arange(200) < 90, 1234567, -5)[None, :]
    options = dict(query_segment_ids=ids, is_causal=True)
    both = attend_and_grads(implementation, q, k, v, dout, **options)
    alone = exact(q[:, second], k[:, second], v[:, second], dout[:, second], is_causal=True)
    assert_usable(rows(both, 0, second, second), alone)
    assert_within(rows(both, 0, second, second), alone, lse=3e-3)
    # No gradient crosses: none but the second document's has a cotangent, or the first's.
    for own, others in ((second, slice(90)), (slice(90), second)):
        got = attend_and_grads(implementation, q, k, v, jnp.zeros_like(dout).at[:, own].set(dout[:, own]), **options)
        for x in (got.dq, got.dk, got.dv):
            assert not x[:, others].any() and x[:, own].any()


def test_ids_may_be_any_integers_in_any_order(implementation):
    # Two orders of the same tokens: only which block a key shares its scale with differs.
    inputs = make_inputs(96, 96, batch=1, heads=2, kv_heads=1, depth=16)
    order = np.random.default_rng(0).permutation(96)
    ids = np.repeat([2**31 - 1, -(2**31), 0], 32)
    packed = attend_and_grads(implementation, *inputs, query_segment_ids=jnp.array(ids)[None])
    mixed = attend_and_grads(
        implementation, *(x[:, order] for x in inputs), query_segment_ids=jnp.array(ids[order])[None]
    )
    for name, x in mixed._asdict().items():
        if x is not None:
            assert relative_error(x, getattr(packed, name)[:, order]) <= 0.03, name


WIDE = {
    "int64 of JAX": (True, jnp.asarray, "int64", "int64", [5, 2**32 + 5, -(2**63), 2**63 - 1]),
    "uint64 of JAX": (True, jnp.asarray, "uint64", "uint64", [5, 2**32 + 5, 2**63 + 5, 2**64 - 1]),
    "int64 and uint64 of JAX": (True, jnp.asarray, "int64", "uint64", [5, 2**32 + 5, -1, -(2**63), 2**64 - 1, 2**63]),
    "int64 and int8 of JAX": (True, jnp.asarray, "int64", "int8", [5, 2**32 + 5, 261, -1]),
    "int32 and int64 of JAX": (True, jnp.asarray, "int32", "int64", [5, 2**32 + 5, -1, 2**32 - 1, 2**31 - 1]),
    "uint32 of JAX": (False, jnp.asarray, "uint32", "uint32", [0, 5, 2**31, 2**31 + 5, 2**32 - 1]),
    "uint32 and int32 of JAX": (False, jnp.asarray, "uint32", "int32", [0, 5, -1, 2**32 - 1, 2**31, -(2**31)]),
    "int64 of NumPy": (False, np.asarray, "int64", "int64", [5, 2**32 + 5, -(2**63), 2**63 - 1, -1]),
    "uint64 and int64 of NumPy": (False, np.asarray, "uint64", "int64", [5, 2**32 + 5, -1, -(2**63), 2**64 - 1, 2**63]),
    "int64 and int32 of NumPy": (False, np.asarray, "int64", "int32", [5, 2**32 + 5, -1, 2**32 - 1]),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", WIDE)
def test_ids_of_any_width_are_told_apart(name, jit):
    # Ids of which 32 bits agree, or which are equal only as bits, are other ids.
    x64, make, kind, key_kind, values = WIDE[name]
    queries, keys = ([x for x in values if np.iinfo(k).min <= x <= np.iinfo(k).max] * 2 for k in (kind, key_kind))
    with jax.enable_x64(x64):
        ids, key_ids = make(np.array([queries], kind)), make(np.array([keys], key_kind))

        def call(ids, key_ids):
            _, visibility = _masks.canonical(
                _masks.Sizes(batch=1, queries=len(queries), keys=len(keys), heads=1, batched=True),
                **dict.fromkeys(("bias", "mask", "query_seq_lengths", "key_value_seq_lengths", "local_window_size")),
                query_segment_ids=ids,
                key_value_segment_ids=key_ids,
            )
            return visibility.query_segments[0, : len(queries)], visibility.key_segments[0, : len(keys)]

        if not jit:
            got, got_keys = call(ids, key_ids)
        elif make is np.asarray:
            # As constants: an argument of jit is JAX's before attention sees it.
            got, got_keys = jax.jit(lambda: call(ids, key_ids))()
        else:
            got, got_keys = jax.jit(call)(ids, key_ids)
    same = [[a == b for b in keys] for a in queries]
    assert ((np.asarray(got)[:, None] == np.asarray(got_keys)[None, :]) == same).all()
    assert got.dtype == got_keys.dtype == jnp.int32


def test_wide_ids_reach_the_scores():
    q, k, v, _ = make_inputs(40, 40, batch=1, heads=1, kv_heads=1, depth=16)
    ids = np.arange(40)[None] // 20
    expected = attention(q, k, v, query_segment_ids=ids, implementation="xla")
    assert_bitwise(attention(q, k, v, query_segment_ids=5 + ids * 2**32, implementation="xla"), expected)
    # Keys of NumPy, of which half have an id that JAX's queries cannot have.
    for kind, other in ((jnp.int32, 2**32), (jnp.uint32, 2**32), (jnp.uint32, -(2**32)), (jnp.uint32, -1)):
        options = dict(query_segment_ids=jnp.asarray(ids, kind), key_value_segment_ids=np.where(ids == 1, other, 0))
        got = attention(q, k, v, implementation="xla", **options)
        assert got[:, :20].any() and not got[:, 20:].any()


def test_gradient_of_the_log_sum_exp(implementation):
    # Smoothing takes each query's own mean from its logits, and the log-sum-exp gives it back.
    q, k, v, dout = make_inputs(120, 100, heads=2, kv_heads=1, depth=16)
    k = k.at[..., 2].add(3.0)
    ids = jnp.sort(normal(1, 2, 120) > 0.3, axis=1).astype(jnp.int32)
    key_ids = jnp.sort(normal(2, 2, 100) > 0, axis=1).astype(jnp.int32) + jnp.array([[0], [1]])
    options = dict(query_segment_ids=ids, key_value_segment_ids=key_ids)
    dlse = normal(3, 2, 120, 2)
    got = attend_and_grads(implementation, q, k, v, 0 * dout, dlse=dlse, **options)
    sees = got.lse > -jnp.inf
    assert not sees.all() and not got.dq[~sees].any()

    def total(q, k):
        logits = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, 2, axis=2)) / 4
        logits = jnp.where((ids[:, :, None] == key_ids[:, None, :])[:, :, None], logits, -jnp.inf)
        peak = jnp.where(sees, logits.max(-1), 0.0)
        sums = jnp.where(sees, jnp.exp(logits - peak[..., None]).sum(-1), 1.0)
        return jnp.where(sees, dlse * (peak + jnp.log(sums)), 0.0).sum()

    dq, dk = jax.grad(total, argnums=(0, 1))(q, k)
    assert relative_error(got.dq, dq) <= 0.03 and relative_error(got.dk, dk) <= 0.03
    assert not got.dv.any()


@few
@hypothesis.given(
    ids=st.lists(st.tuples(st.sampled_from([-(2**31), -1, 0, 5, 2**31 - 1]), st.booleans()), min_size=9, max_size=9),
    key_ids=st.lists(
        st.tuples(st.sampled_from([-(2**31), 0, 5, 7, 2**31 - 1]), st.booleans()), min_size=12, max_size=12
    ),
)
def test_canonical_segments(ids, key_ids):
    (queries, query_counts), (keys, key_counts) = (map(np.array, zip(*x, strict=True)) for x in (ids, key_ids))
    arrays = [jnp.array(x)[None] for x in (queries.astype(np.int32), keys.astype(np.int32), query_counts, key_counts)]
    got_queries, got_keys = (np.array(x[0]) for x in jax.jit(_segments.canonical_segments)(*arrays))
    same = (queries[:, None] == keys[None, :]) & query_counts[:, None] & key_counts[None, :]
    assert ((got_queries[:, None] == got_keys[None, :]) == same).all()
    assert ((got_queries < 0) == ~same.any(1)).all() and ((got_keys < 0) == ~same.any(0)).all()
    for segment in set(got_keys[got_keys >= 0]):
        assert got_keys[segment] == segment == np.flatnonzero(got_keys == segment)[0]
    # Means, and that nothing of another segment is in them.
    key = normal(1, 1, 12, 2, 4)
    key_means = jax.jit(_segments.key_means)
    means = key_means(key, jnp.array(got_keys)[None])
    poisoned = key_means(key.at[0, got_keys < 0].set(jnp.nan), jnp.array(got_keys)[None])
    assert_bitwise(poisoned, means)
    for place, segment in enumerate(got_keys):
        expected = np.asarray(key)[0, got_keys == segment].mean(0) if segment >= 0 else np.zeros((2, 4))
        assert relative_error(means[0, place], expected) <= 1e-6
    of_queries = _segments.of_queries(means, jnp.array(got_queries)[None])
    for place, segment in enumerate(got_queries):
        assert_bitwise(of_queries[0, place], means[0, segment] if segment >= 0 else jnp.zeros((2, 4)))

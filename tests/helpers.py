"""What the attention tests share: inputs, one forward and backward pass, and how two results are compared."""

import contextlib
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launch
from sagebwd_jax import SageConfig, attention
from sagebwd_jax._config import CallSpec
from sagebwd_jax.reference import (
    Attended,
    exact_attention_and_grads,
    quantized_attention_and_grads,
)

GRADS = ("dq", "dk", "dv")


def is_about_attention(module):
    """Whether a test module is one of those that hold attention itself, not the training around it."""
    return not module.startswith(("test_train", "test_flax", "test_compile"))


def normal(seed, *shape, dtype=jnp.float32):
    """Gaussian values, drawn in float32 and then rounded: drawn in 16 bits they have too few distinct values."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def make_inputs(queries, keys, *, batch=2, heads=6, kv_heads=3, depth=64, dtype=jnp.float32, seed=0):
    """query, key, value and a random cotangent of the output."""
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    return [normal(4 * seed + i, batch, *shape, depth, dtype=dtype) for i, shape in enumerate(shapes)]


def call_spec(queries=256, keys=256, *, depth=128, **changes):
    """What a plain call of these lengths and channels is to the kernels, but for `changes`."""
    plain = CallSpec(
        is_causal=False,
        scale=1.0,
        query_length=queries,
        key_length=keys,
        implementation="triton",
        differentiates_lse=False,
        config=SageConfig(),
    )
    spec = dataclasses.replace(plain, **changes)
    return dataclasses.replace(spec, config=spec.config.at_depth(depth))


@contextlib.contextmanager
def using(implementation):
    """The argument `implementation` for a parameter of the fixture of that name, in the context that it needs."""
    interpreted = implementation == "triton-interpreted"
    with launch.interpreted() if interpreted else contextlib.nullcontext():
        yield "triton" if interpreted else implementation


# Plain JAX and, on a GPU, the kernels.
COMPILED = ["xla", pytest.param("triton", marks=pytest.mark.gpu)]


class Results(NamedTuple):
    """What one forward and backward pass of a plain call makes."""

    out: jax.Array
    lse: jax.Array
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


def forward_and_backward(implementation, *, training=False, **options):
    """A jitted (query, key, value, dout) -> Results. A new one a call: its cache must not mix implementations.

    With `training` the gradients are those of a call that returns no log-sum-exp: on some GPUs other kernels make them.
    """

    def run(query, key, value, dout):
        with using(implementation) as name:
            call = functools.partial(attention, implementation=name, **options)
            with_lse = functools.partial(call, return_residual=True)
            if training:
                out, vjp = jax.vjp(call, query, key, value)
                return Results(out, with_lse(query, key, value)[1], *vjp(dout))
            (out, lse), vjp = jax.vjp(with_lse, query, key, value)
            return Results(out, lse, *vjp((dout, jnp.zeros_like(lse))))

    return jax.jit(run)


@functools.partial(jax.jit, static_argnames=("is_causal", "scale", "config", "local_window_size"))
def oracle(query, key, value, dout, **options):
    """The quantised algorithm in its dense form."""
    return quantized_attention_and_grads(query, key, value, dout, **options)


@functools.partial(jax.jit, static_argnames=("is_causal", "scale", "local_window_size"))
def exact(query, key, value, dout, **options):
    """Attention that is not quantised."""
    return exact_attention_and_grads(query, key, value, dout, **options)


def attend_and_grads(implementation, query, key, value, dout, *, dlse=None, **options):
    """`Attended` of one call with masks or a bias; arrays among the options are arguments of what is compiled."""
    arrays = {name: x for name, x in options.items() if hasattr(x, "shape")}
    static = tuple((name, x) for name, x in options.items() if name not in arrays)
    return _attend_and_grads(query, key, value, dout, dlse, arrays, implementation, static)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _attend_and_grads(query, key, value, dout, dlse, arrays, implementation, static):
    bias = arrays.pop("bias", None)
    with using(implementation) as name:

        def call(query, key, value, bias):
            more = arrays | dict(static) | dict(implementation=name, return_residual=True)
            return attention(query, key, value, bias, **more)

        (out, lse), vjp = jax.vjp(call, query, key, value, bias)
        return Attended(out, lse, *vjp((dout, jnp.zeros_like(lse) if dlse is None else dlse)))


def without_empty_rows(attended):
    """The same with a log-sum-exp of 0 where a query sees no key."""
    return attended._replace(lse=jnp.where(attended.lse == -jnp.inf, 0.0, attended.lse))


@functools.cache
def shared_forward_and_backward(implementation, **options):
    """The same one for equal arguments, for modules that use one shape many times."""
    return forward_and_backward(implementation, **options)


def count_kernels(function, *inputs, name="sagebwd_"):
    """How many kernels whose name starts so the traced function launches; each call of a shared program counts."""

    def count(jaxpr):
        total, read = 0, set(map(id, jaxpr.outvars))
        # Backwards, to leave out what nothing reads, as the compiler does; JAX's own pass keeps every kernel to 0.11.
        for eqn in reversed(jaxpr.eqns):
            if read.isdisjoint(map(id, eqn.outvars)):
                continue
            read.update(map(id, eqn.invars))
            if eqn.primitive.name in ("pallas_call", "mpmd_map"):
                total += str(eqn.params.get("name") or eqn.params["name_and_src_info"]).startswith(name)
            else:
                total += sum(count(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
        return total

    return count(jax.make_jaxpr(function)(*inputs).jaxpr)


def as_float64(x):
    return np.asarray(x.astype(jnp.float32) if hasattr(x, "astype") else x, np.float64)


def relative_error(got, expected):
    """norm(got - expected) / norm(expected); 0 where both are zero."""
    got, expected = as_float64(got), as_float64(expected)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    error, size = np.linalg.norm(got - expected), np.linalg.norm(expected)
    return 0.0 if error == 0 else error / size if size else np.inf


def cosine(got, expected):
    got, expected = as_float64(got).ravel(), as_float64(expected).ravel()
    return float(got @ expected / (np.linalg.norm(got) * np.linalg.norm(expected)))


def assert_within(got, expected, **bounds):
    """Every field of two `Attended` that `bounds` names is within its relative error; says all that are not."""
    errors = {name: relative_error(getattr(got, name), getattr(expected, name)) for name in bounds}
    # Written so that NaN fails.
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name]}
    assert not wrong, f"relative errors {_show(wrong)} above {_show(bounds)}; all: {_show(errors)}"


def assert_cosines(got, expected, **bounds):
    """Every field that `bounds` names points where it should."""
    cosines = {name: cosine(getattr(got, name), getattr(expected, name)) for name in bounds}
    wrong = {name: value for name, value in cosines.items() if not value >= bounds[name]}
    assert not wrong, f"cosines {_show(wrong)} below {_show(bounds)}; all: {_show(cosines)}"


def assert_usable(got, expected, *, out=0.03, grads=0.08):
    """Close enough to exact attention for training: the bounds of users of quantised attention."""
    assert_within(got, expected, out=out, dq=grads, dk=grads, dv=grads)
    assert_cosines(got, expected, out=0.999, dq=0.997, dk=0.997, dv=0.997)


def assert_finite(got, fields=("out", "lse", *GRADS)):
    wrong = [name for name in fields if not np.isfinite(as_float64(getattr(got, name))).all()]
    assert not wrong, f"not finite: {wrong}"


def assert_bitwise(got, expected):
    """Two trees hold the same bits; NaN equals NaN of the same bits."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes(), f"leaf {index}: {(a != b).sum()} of {a.size} values differ"


def _show(numbers):
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())

"""The JAX methods that are timed: SageBwd's presets, whole and as kernels alone, and the peers that are installed."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable

import jax

from benchmarks.cases import Case
from benchmarks.traces import split_at_kernels
from pallas_kernels import attention as kernels
from sagebwd_jax import SageConfig, attention
from sagebwd_jax._attention import padded_depth
from sagebwd_jax._config import CallSpec
from sagebwd_jax._masks import Visibility

PRESETS = {"sagebwd": SageConfig(), "sagebwd mixed": SageConfig.mixed()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """`attend(query, key, value, is_causal=...)` under a name; `precision` is a key of `cases.ERROR_BOUND`."""

    name: str
    precision: str
    attend: Callable
    config: SageConfig | None = None

    def passes(self, depth: int) -> tuple[str, ...]:
        """The passes it is timed on; kernels alone only at head dims that `attention` need not pad for them."""
        whole = ("forward", "forward+backward")
        has_kernels = self.config is not None and padded_depth(depth) == depth
        return (*whole, "forward kernels", "backward kernels") if has_kernels else whole


def jax_methods(sagebwd_implementation: str = "triton", *, dry: bool = False) -> list[Method]:
    """SageBwd first, then the peers; with `dry`, only what runs on a CPU."""
    ours = [
        Method(
            name=name,
            precision="int8",
            attend=functools.partial(attention, implementation=sagebwd_implementation, config=config),
            config=config,
        )
        for name, config in PRESETS.items()
    ]
    if dry:
        return [*ours, Method(name="XLA", precision="16-bit", attend=jax.nn.dot_product_attention)]
    peers = {
        "cuDNN": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
        "Pallas mha": _pallas_mha,
    }
    if importlib.util.find_spec("tokamax") is not None:
        peers |= {
            "tokamax Triton": functools.partial(_tokamax, implementation="triton"),
            "tokamax Mosaic GPU": functools.partial(_tokamax, implementation="mosaic"),
        }
    return ours + [Method(name=name, precision="16-bit", attend=attend) for name, attend in peers.items()]


def is_wanted(name: str, parts: list[str] | None) -> bool:
    """Whether a name holds one of the parts, in any case; any name where none are given."""
    return not parts or any(part.lower() in name.lower() for part in parts)


def _pallas_mha(query, key, value, *, is_causal):
    """JAX's own Triton kernel through Pallas, the same compiler as ours."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as pallas_attention
    # Its default tiles of 32 in the backward pass would make it look slower than it can be.
    blocks = pallas_attention.BlockSizes(
        block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
    )
    scale = query.shape[-1] ** -0.5
    return pallas_attention.mha(query, key, value, None, scale, is_causal, blocks)


def _tokamax(query, key, value, *, is_causal, implementation):
    """tokamax, imported when it is first used."""
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.dot_product_attention(query, key, value, is_causal=is_causal, implementation=implementation)


def whole_pass(method: Method, pass_: str, case: Case) -> Callable:
    """The pass as a function of (query, key, value, dout): O, or (O, dQ, dK, dV)."""
    attend = functools.partial(method.attend, is_causal=case.causal)
    if pass_ == "forward":
        return lambda query, key, value, dout: (attend(query, key, value),)

    def forward_and_backward(query, key, value, dout):
        out, vjp = jax.vjp(attend, query, key, value)
        return (out, *vjp(dout))

    return forward_and_backward


def call_spec(case: Case, config: SageConfig) -> CallSpec:
    """What a plain call of `attention` on this case is to the implementations."""
    return CallSpec(
        is_causal=case.causal,
        scale=case.depth**-0.5,
        query_length=case.length,
        key_length=case.length,
        implementation="triton",
        differentiates_lse=False,
        config=config.at_depth(case.depth),
    )


def both_passes(
    case: Case, config: SageConfig, masks: str | None = None, *, length: int | None = None, dtype: str = "bfloat16"
) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """The implementation's forward and backward pass, all results returned, and the shapes it takes.

    `masks` is a key of MASKS, for a call with them, and with dbias if there is a bias. From `length` on the case's
    tokens are padding. `dtype` is that of query, key, value and dout.
    """
    fields, window = MASKS[masks](case) if masks else ({}, (None, None))
    tokens, packed = case.length if length is None else length, "query_segments" in fields
    spec = call_spec(case, config.for_documents() if packed else config)
    spec = dataclasses.replace(spec, window=window, query_length=tokens, key_length=tokens, packed=packed)

    def run(query, key, value, dout, *more):
        visibility = Visibility(**dict(zip(fields, more, strict=True))) if masks else None
        out, lse, residuals = kernels.forward(query, key, value, visibility, spec=spec, keep=True)
        assert residuals is not None
        grads = kernels.backward(residuals, dout, None, visibility, spec=spec, want_dbias="bias" in fields)
        return out, lse, grads

    return run, [*[jax.ShapeDtypeStruct(case.shape, dtype)] * 4, *fields.values()]


def _segments(case):
    """Segment ids of queries and keys, as Visibility has them."""
    ids = jax.ShapeDtypeStruct((case.batch, case.length), jax.numpy.int32)
    return dict(query_segments=ids, key_segments=ids)


def _scores(case, dtype, heads=1):
    """A mask or a bias of every query and key."""
    return jax.ShapeDtypeStruct((case.batch, heads, case.length, case.length), dtype)


# Masks to compile for: (fields of Visibility, window) of a case.
MASKS = {
    "window": lambda case: ({}, (1024, 0)),
    "segments": lambda case: (_segments(case), (None, None)),
    "mask": lambda case: (dict(mask=_scores(case, jax.numpy.int8)), (None, None)),
    "bias": lambda case: (dict(bias=_scores(case, jax.numpy.float32, case.heads)), (None, None)),
    "everything": lambda case: (
        dict(
            **_segments(case),
            mask=_scores(case, jax.numpy.int8),
            bias=_scores(case, jax.numpy.bfloat16, case.heads),
        ),
        (1024, 64),
    ),
}


def kernel_pass(method: Method, pass_: str, case: Case) -> tuple[Callable, Callable]:
    """(prepare, run): `prepare(query, key, value, dout)` makes the operands that `run`, the kernels alone, takes.

    `run` returns O (and what else the forward kernel writes), or (dQ, dK, dV) in the order of `attention.backward`.
    """
    if method.config is None:
        raise ValueError(f"{method.name} has no kernels of ours")
    spec = call_spec(case, method.config)
    shapes = [jax.ShapeDtypeStruct(case.shape, jax.numpy.bfloat16)] * 4
    if pass_ == "forward kernels":

        def forward(query, key, value, dout):
            return kernels.forward(query, key, value, spec=spec, keep=False)[0]

        return split_at_kernels(forward, shapes)

    def residuals_of(query, key, value):
        return kernels.forward(query, key, value, spec=spec, keep=True)[2]

    def backward(residuals, dout):
        return kernels.backward(residuals, dout, None, spec=spec)

    residual_shapes = jax.eval_shape(residuals_of, *shapes[:3])
    prepare, run = split_at_kernels(backward, (residual_shapes, shapes[3]))
    return lambda query, key, value, dout: prepare(residuals_of(query, key, value), dout), run

"""What changes the numbers: SageConfig and its presets, and the static description of one call.

Anything that only changes speed (warps, stages, rows per program) is in pallas_kernels/tiles.py instead.
"""

import dataclasses
from typing import Literal

MATRIX_PRODUCTS = ("qk", "pv", "dv", "dq", "dk")
# Every length is padded to this inside: the largest tile, so that each span and block below divides it.
LENGTH_MULTIPLE = 128
_SPANS = (32, 64, 128)
# A scale that a tile shares is over what one program of a kernel holds. 128 x 128 scores at depth 128 are too much: in
# two stages they take 112 KiB of shared memory, with a bias 240 KiB (dQ, compiled for an RTX 4090), which no GPU has.
_LARGEST_TILE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class SageConfig:
    """How the six INT8 matrix products of attention are quantised (arXiv 2603.02170, sections 3 and 6).

    All scales are absmax/127 over the values that share them, held in float32. dP = dO V^T is always a 16-bit product.
    The defaults are finer than the paper's one scale per tile where that costs nothing; `faithful()` has the paper's.

    Attributes:
      smooth_k: subtract from K its mean over the keys of a head before it is quantised. Softmax does not change.
      smooth_q: the paper's per-tile mean of Q; it found no gain. Only False is supported.
      query_scale: "token" (one scale a query) or "block" (one per `block_q` queries of a head).
      key_scale: "token" or "block" (one per `block_k` keys of a head).
      value_scale: "channel" (one scale a head and channel) or "block" (one per `pv_span` keys).
      dout_scale: of dO, "token" or "block" (one per `block_q` queries of a head).
      grad_scale: P and dS of the backward pass have one scale per "row" of a kernel's tile, or one per "tile" of
        `block_q` x `block_k` scores, each at most 64: such a tile is a kernel's own.
      sixteen_bit: the products that stay in 16 bits, out of "qk", "pv", "dv", "dq", "dk". "qk" is S = Q K^T, also where
        the backward pass repeats it; "pv" is O = P V; the others make the gradients of those names.
      block_q: queries, a power of two.
      block_k: keys, a power of two.
      pv_span: keys over which a query's row of P shares its scale in O = P V.
      dv_span: queries over which a key's row of P shares its scale in dV = P^T dO; None for 64 at head dims to 64 and
        128 above, which the fastest kernels take.
      dk_span: queries over which a key's row of dS shares its scale in dK = dS^T Q.
      dq_span: keys over which a query's row of dS shares its scale in dQ = dS K.

    Raises:
      ValueError: a value is not one of those accepted.
      NotImplementedError: smooth_q=True.
    """

    smooth_k: bool = True
    smooth_q: bool = False
    query_scale: Literal["token", "block"] = "token"
    key_scale: Literal["token", "block"] = "block"
    value_scale: Literal["channel", "block"] = "channel"
    dout_scale: Literal["token", "block"] = "token"
    grad_scale: Literal["row", "tile"] = "row"
    sixteen_bit: frozenset[str] = frozenset()
    block_q: int = 128
    block_k: int = 128
    pv_span: int = 128
    dv_span: int | None = None
    dk_span: int = 64
    dq_span: int = 64

    def __post_init__(self):
        object.__setattr__(self, "sixteen_bit", frozenset(self.sixteen_bit))
        if self.smooth_q:
            raise NotImplementedError("smooth_q=True: only smooth_q=False is supported; smoothing Q brought no gain")
        for name, accepted in _ACCEPTED.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}={getattr(self, name)!r}: accepted are {', '.join(map(repr, accepted))}")
        if unknown := self.sixteen_bit - set(MATRIX_PRODUCTS):
            raise ValueError(f"sixteen_bit holds {sorted(unknown)}: accepted are {', '.join(MATRIX_PRODUCTS)}")
        # A scale must not vary along a sum, and a kernel reads one key scale a tile.
        if self.key_scale == "block" and self.block_k % max(self.pv_span, self.dq_span):
            raise ValueError(f"block_k={self.block_k} must be a multiple of {self.pv_span=} and {self.dq_span=}")
        if self.grad_scale == "tile":
            if max(self.block_q, self.block_k) > _LARGEST_TILE:
                raise ValueError(
                    f"grad_scale='tile' needs block_q and block_k of at most {_LARGEST_TILE}; "
                    f"got block_q={self.block_q} and block_k={self.block_k}"
                )
            spans = dict(dv_span=self.block_q, dk_span=self.block_q, dq_span=self.block_k)
            for name, block in spans.items():
                if getattr(self, name) not in (block, None):
                    raise ValueError(f"grad_scale='tile' needs {name}={block}, the block; got {getattr(self, name)}")

    def at_depth(self, depth: int) -> "SageConfig":
        """This config with what it leaves open chosen for heads of `depth` channels: what a call computes by."""
        if self.dv_span is not None:
            return self
        span = self.block_q if self.grad_scale == "tile" else 64 if depth <= 64 else 128
        return dataclasses.replace(self, dv_span=span)

    def for_documents(self) -> "SageConfig":
        """The same for packed documents, no two of which share a scale."""
        return dataclasses.replace(self, **_FOR_DOCUMENTS)

    @classmethod
    def faithful(cls) -> "SageConfig":
        """The paper's scales: one per 64x64 tile for Q, K, V, dO and, in the backward pass, P and dS (section 3)."""
        return cls(
            query_scale="block",
            value_scale="block",
            dout_scale="block",
            grad_scale="tile",
            block_q=64,
            block_k=64,
            pv_span=64,
            dv_span=64,
            dk_span=64,
            dq_span=64,
        )

    @classmethod
    def mixed(cls) -> "SageConfig":
        """Q K^T and P V in INT8, the gradients' products in 16 bits: the fastest on data-centre GPUs."""
        return cls(sixteen_bit=frozenset({"dv", "dq", "dk"}))

    @classmethod
    def precise(cls) -> "SageConfig":
        """Q K^T in 16 bits, the others in INT8 with finer scales: the most accurate, above all of large logits."""
        return cls(sixteen_bit=frozenset({"qk"}), pv_span=64, dv_span=64)


_FOR_DOCUMENTS = dict(
    query_scale="token", key_scale="token", value_scale="channel", dout_scale="token", grad_scale="row"
)
_ACCEPTED = dict(
    smooth_k=(True, False),
    query_scale=("token", "block"),
    key_scale=("token", "block"),
    value_scale=("channel", "block"),
    dout_scale=("token", "block"),
    grad_scale=("row", "tile"),
    block_q=_SPANS,
    block_k=_SPANS,
    pv_span=_SPANS,
    dv_span=(*_SPANS, None),
    dk_span=_SPANS,
    dq_span=_SPANS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSpec:
    """The static facts of one call, in canonical form: what the implementations are compiled for.

    Attributes:
      is_causal: query i sees keys 0..i.
      scale: of the logits; natural units.
      query_length: queries that count; the arrays hold more, up to a multiple of LENGTH_MULTIPLE.
      key_length: keys that count, likewise.
      implementation: "triton", "xla", or None: by the platform that the call is lowered for.
      differentiates_lse: the log-sum-exp is an output of the call, so it may have a cotangent.
      config: what changes the numbers, with nothing left open (`SageConfig.at_depth`).
      window: query i sees keys i-left..i+right; None for an end without limit. See `reach`.
      packed: documents lie side by side, so a channel of V has a scale for each (`SageConfig.for_documents`).
    """

    is_causal: bool
    scale: float
    query_length: int
    key_length: int
    implementation: str | None
    differentiates_lse: bool
    config: SageConfig
    window: tuple[int | None, int | None] = (None, None)
    packed: bool = False

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(left, right): how far before and after its own position a query sees; None for no limit."""
        left, right = self.window
        return left, 0 if self.is_causal else right

    def keeps_16_bits(self, *products: str) -> bool:
        """Whether any of these products stays in 16 bits."""
        return not self.config.sixteen_bit.isdisjoint(products)

    def uses_int8(self, *products: str) -> bool:
        """Whether any of these products runs in INT8."""
        return bool(set(products) - self.config.sixteen_bit)

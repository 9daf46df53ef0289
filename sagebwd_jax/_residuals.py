"""What the forward pass keeps for the backward pass: the same for every implementation, under documented names."""

import dataclasses

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, BFloat16, Float, Float32, Int8, Int16

# For jax.checkpoint_policies.save_only_these_names: with all of them saved, the forward kernel does not run again.
RESIDUAL_NAMES = (
    "sagebwd_query",
    "sagebwd_key",
    "sagebwd_value",
    "sagebwd_out",
    "sagebwd_lse",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residuals:
    """Kept tensors in canonical form; None where no product of the config reads them.

    With six products in INT8, 6 bytes per token and channel (q_int8, k_int8, value_16, out_int16), where 16-bit
    attention keeps 8.
    """

    q_int8: Int8[Array, "B N T H"] | None
    q_scale: Float32[Array, "B N T"] | None
    q_16: Float[Array, "B T N H"] | None
    k_int8: Int8[Array, "B K S H"] | None
    # One a key, or one per config.block_k keys.
    k_scale: Float32[Array, "B K scales"] | None
    k_raw_16: Float[Array, "B S K H"] | None
    k_smooth_16: BFloat16[Array, "B K S H"] | None
    value_16: Float[Array, "B S K H"]
    # O with a scale a row, not rounded to 16 bits of floating point: delta is made from it (arXiv 2510.04212).
    out_int16: Int16[Array, "B T N H"]
    out_scale: Float32[Array, "B N T"]
    lse: Float32[Array, "B N T"]

    def named(self) -> "Residuals":
        """The same, each tensor under its checkpoint name."""
        prefixes = dict(q="query", k="key", value="value", out="out", lse="lse")
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        names = {name: f"sagebwd_{prefixes[name.split('_')[0]]}" for name in kept}
        return dataclasses.replace(
            self, **{name: checkpoint_name(x, names[name]) for name, x in kept.items() if x is not None}
        )

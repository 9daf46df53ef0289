"""AdamW with clipping, linear warm-up, cosine decay, and weight decay on matrices only."""

from typing import Any

import jax
import optax

from .config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear rise to the peak over warmup_steps, then half a cosine down to the final ratio at the last step.

    Step 0 already moves: step s of warm-up has peak * (s + 1) / (warmup_steps + 1).
    """
    peak = config.peak_learning_rate
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (config.warmup_steps + 1),
        peak_value=peak,
        warmup_steps=config.warmup_steps,
        # The last of `steps` updates has index steps - 1; it is the one to have the final rate.
        decay_steps=max(steps - 1, config.warmup_steps + 1),
        end_value=peak * config.final_learning_rate_ratio,
    )


def decay_mask(params: Any) -> Any:
    """True for what decays: matrices and the embedding, not the gains of norms."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip the global norm, then AdamW (Loshchilov and Hutter, arXiv 1711.05101) with the schedule."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )

"""AdamW or Muon with clipping, warm-up, cosine or WSD, and weight decay on matrices only."""

from typing import Any

import jax
import optax
from optax import contrib

from .config import OptimizerConfig
from .mesh import parameter_name


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear rise to the peak over warmup_steps, then down to the final ratio at the last step.

    "cosine" goes down along half a cosine; "wsd" stays at the peak and goes down in a line over the last
    decay_fraction of all steps (Hu et al., arXiv 2404.06395). Step 0 already moves: step s of warm-up has
    peak * (s + 1) / (warmup_steps + 1).
    """
    peak, warmup = config.peak_learning_rate, config.warmup_steps
    # The last of `steps` updates has index steps - 1; it is the one to have the final rate.
    last = max(steps - 1, warmup + 1)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=peak / (warmup + 1),
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=last,
            end_value=peak * config.final_learning_rate_ratio,
        )
    decay_start = max(warmup, last - max(1, round(config.decay_fraction * steps)))
    rise = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
    fall = optax.linear_schedule(peak, peak * config.final_learning_rate_ratio, last - decay_start)
    return optax.join_schedules([rise, optax.constant_schedule(peak), fall], [warmup, decay_start])


def decay_mask(params: Any) -> Any:
    """True for what decays: matrices and the embedding, not the gains of norms."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip the global norm, then AdamW (Loshchilov and Hutter, arXiv 1711.05101) or Muon with the schedule.

    Muon (Jordan et al., 2024) turns the momentum of each matrix of a layer into an orthogonal one; embedding and gains
    take AdamW, with Nesterov's momentum as optax's Muon has it. Muon's update is scaled to the size of AdamW's (Liu et
    al., arXiv 2502.16982), so that one rate suits both.
    """
    schedule = learning_rate_schedule(config, steps)
    clip = optax.clip_by_global_norm(config.clip_norm)
    adam: dict[str, Any] = dict(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    if config.optimizer == "adamw":
        adamw = optax.adamw(schedule, **adam, weight_decay=config.weight_decay, mask=decay_mask)
        return optax.chain(clip, adamw)
    muon = contrib.muon(
        1.0,
        beta=config.muon_beta,
        eps=config.epsilon,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=config.muon_update_rms,
        muon_weight_dimension_numbers=matrix_axes,
    )
    # optax's Muon would decay the gains of norms too. Its updates are negative already, and so the decay is.
    decay = optax.add_decayed_weights(-config.weight_decay, mask=decay_mask)
    return optax.chain(clip, muon, decay, optax.scale_by_schedule(schedule))


def matrix_axes(params: Any) -> Any:
    """Which axes of a layer's kernel are summed over and which are made, for Muon; None for what takes AdamW."""

    def axes(path: Any, leaf: Any) -> contrib.MuonDimensionNumbers | None:
        name = parameter_name(path)
        if not name.endswith(".kernel"):
            return None
        # [W, N, H] into the heads, [N, H, W] out of them, and plain [W, F].
        summed = tuple(range(leaf.ndim - 1)) if ".out." in name else (0,)
        return contrib.MuonDimensionNumbers(summed, tuple(range(len(summed), leaf.ndim)))

    return jax.tree_util.tree_map_with_path(axes, params)

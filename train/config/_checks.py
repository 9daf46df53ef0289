"""What a TrainConfig refuses: values that contradict each other or their own unit."""

from train.config._mesh import parse_mesh
from train.config._settings import BYTE_VOCABULARY, DataConfig, ModelConfig, OptimizerConfig, SettingError, TrainConfig

# As sagebwd_jax refuses what is above, which is asked for only when the run's folder has been made.
SAGEBWD_HEAD_DIM = 256


def check(config: TrainConfig) -> None:
    """Raises SettingError with the name, the value and what is accepted."""
    for name in ("steps", "tokens_per_step", "micro_batch", "log_every", "eval_every"):
        _at_least(config, name, 1)
    for name in ("keep_checkpoints", "health_tokens", "max_skipped_in_a_row"):
        _at_least(config, name, 1)
    for name in ("checkpoint_every", "health_every"):
        _at_least(config, name, 0)
    if not 0 <= config.seed < 1 << 32:
        # JAX takes the last 32 bits of a seed.
        raise SettingError(f"seed={config.seed} must be at least 0 and below 2**32")
    parse_mesh(config.mesh)
    config.accumulation(shards=1)
    if config.peak_flops is not None and not config.peak_flops > 0:
        raise SettingError(f"peak_flops={config.peak_flops} must be above 0")
    _check_model(config.model, config.data.sequence_length)
    _check_data(config.data, config.model.vocab_size)
    _check_optimizer(config.optimizer, config.steps)


def _check_model(model: ModelConfig, sequence_length: int) -> None:
    """Shapes that fit each other."""
    for name in ("num_layers", "width", "ffn_width", "num_heads", "num_kv_heads", "head_dim", "loss_chunk"):
        _at_least(model, name, 1)
    for name in ("rope_theta", "norm_eps"):
        if not getattr(model, name) > 0:
            raise SettingError(f"{name}={getattr(model, name)} must be above 0")
    if model.num_heads % model.num_kv_heads:
        raise SettingError(f"num_heads={model.num_heads} must be a multiple of num_kv_heads={model.num_kv_heads}")
    if model.attention == "cudnn" and model.compute_dtype != "bfloat16":
        raise SettingError(f"attention='cudnn' takes compute_dtype='bfloat16', not {model.compute_dtype!r}")
    if model.attention == "sagebwd" and model.head_dim > SAGEBWD_HEAD_DIM:
        raise SettingError(f"attention='sagebwd' takes head_dim up to {SAGEBWD_HEAD_DIM}, not {model.head_dim}")
    if model.head_dim % 2:
        raise SettingError(f"head_dim={model.head_dim} must be even: RoPE turns channels in pairs")
    if model.vocab_size < BYTE_VOCABULARY:
        raise SettingError(f"vocab_size={model.vocab_size} must be at least {BYTE_VOCABULARY}: text is read as bytes")
    if model.loss_chunk < sequence_length and sequence_length % model.loss_chunk:
        raise SettingError(
            f"loss_chunk={model.loss_chunk} must divide sequence_length={sequence_length} or be above it"
        )


def _check_data(data: DataConfig, vocab_size: int) -> None:
    """Counts, the fraction held out and the separator."""
    for name in ("sequence_length", "max_bytes", "held_out_sequences"):
        _at_least(data, name, 1)
    _at_least(data, "workers", 0)
    if not 0 < data.held_out_fraction < 1:
        raise SettingError(f"held_out_fraction={data.held_out_fraction} must lie between 0 and 1")
    if data.separator is not None and not 0 <= data.separator < vocab_size:
        raise SettingError(f"separator={data.separator} must be at least 0 and below vocab_size={vocab_size}")


def _check_optimizer(optimizer: OptimizerConfig, steps: int) -> None:
    """Rates, decays and the length of warm-up."""
    if not 0 <= optimizer.warmup_steps < steps:
        raise SettingError(f"warmup_steps={optimizer.warmup_steps} must be at least 0 and below steps={steps}")
    for name in ("peak_learning_rate", "clip_norm", "epsilon", "muon_update_rms"):
        if not getattr(optimizer, name) > 0:
            raise SettingError(f"{name}={getattr(optimizer, name)} must be above 0")
    for name in ("beta1", "beta2", "muon_beta", "ema_decay"):
        if not 0 <= getattr(optimizer, name) < 1:
            raise SettingError(f"{name}={getattr(optimizer, name)} must be at least 0 and below 1")
    for name in ("weight_decay", "z_loss", "final_learning_rate_ratio"):
        if not getattr(optimizer, name) >= 0:
            raise SettingError(f"{name}={getattr(optimizer, name)} must be at least 0")
    if not 0 < optimizer.decay_fraction <= 1:
        raise SettingError(f"decay_fraction={optimizer.decay_fraction} must be above 0 and at most 1")


def _at_least(section: TrainConfig | ModelConfig | DataConfig, name: str, least: int) -> None:
    """Refuses a count below its least value."""
    if getattr(section, name) < least:
        raise SettingError(f"{name}={getattr(section, name)} must be at least {least}")

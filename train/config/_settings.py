"""The settings themselves: frozen typed dataclasses and their JSON form beside the run.

No default lives outside this file. The fields that a preset should think about have no default at all.
"""

import dataclasses
import json
import types
import typing
from typing import Any, Literal

AttentionName = Literal["sagebwd", "exact", "cudnn"]
PresetName = Literal["tiny", "30m", "124m", "325m", "325m-2m", "1b"]

BYTE_VOCABULARY = 256
# GPT-2's 50,257 tokens padded to a multiple of 128. The names 30m, 124m and 325m count parameters with this vocabulary.
GPT2_VOCABULARY = 50_304


class SettingError(ValueError):
    """A setting or a data set that cannot be used; the message carries the values and says what is accepted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of the decoder."""

    attention: AttentionName = "sagebwd"
    """Who computes attention: INT8 SageBwd, exact attention by XLA, or cuDNN's, on NVIDIA GPUs only (name)."""
    sage_preset: Literal["default", "mixed", "precise", "faithful"] = "default"
    """Which SageConfig SageBwd runs with (name)."""
    num_layers: int
    """Decoder layers (count)."""
    width: int
    """Residual stream (channels)."""
    ffn_width: int
    """Hidden layer of SwiGLU (channels)."""
    num_heads: int
    """Query heads (count)."""
    num_kv_heads: int
    """Key and value heads (count); divides num_heads."""
    head_dim: int
    """One head (channels); even, for RoPE turns channels in pairs."""
    vocab_size: int = GPT2_VOCABULARY
    """Rows of the embedding (tokens); every token of the data is below it."""
    qk_norm: bool = True
    """RMS norm of each head of queries and keys before RoPE (switch)."""
    rope_theta: float = 10_000.0
    """Longest wavelength of RoPE divided by 2 pi (tokens)."""
    norm_eps: float = 1e-6
    """Added to the mean square inside every RMS norm (unitless)."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations and matrix products; parameters, norms, loss and optimizer are float32 (name)."""
    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype the loss keeps logits in for its float32 softmax; at bfloat16, as nanoGPT, half the bytes move (name)."""
    recompute: Literal["none", "all_but_attention", "all"] = "none"
    """What of a layer the backward pass computes again; SageBwd's own residuals are what the second keeps (name)."""
    loss_chunk: int
    """Tokens of each sequence whose logits exist at one time (tokens); divides sequence_length or is above it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it is split."""

    data: str | None = None
    """Text, JSON lines or token shards: a file or a folder (path); None reads the Python standard library's source."""
    tokenizer: str | None = None
    """A tokenizer.json (path); None takes the one beside token shards, and for text and JSON lines bytes."""
    separator: int | None = None
    """Token between two documents (id); None: the tokenizer's <|endoftext|>, else GPT-2's for shards, 0 for bytes."""
    text_field: str = "text"
    """Field of a JSON line that holds the document (name)."""
    documents: Literal["stream", "packed"] = "stream"
    """Whether tokens see the documents before theirs in a sequence, or "packed": their own alone (name)."""
    sequence_length: int
    """Tokens that one sequence predicts (tokens)."""
    max_bytes: int = 1 << 30
    """Text read at most; all of it stays in memory, token shards never do (bytes)."""
    held_out_fraction: float = 0.05
    """Share kept from training, unless shards are named val or test (fraction of bytes or tokens)."""
    held_out_sequences: int
    """Sequences that the held-out loss averages over (count)."""
    on_bad_data: Literal["stop", "skip"] = "stop"
    """Damaged files and lines: an error, or left out and counted; shards are then read once at the start (name)."""
    workers: int = 0
    """Processes that read ahead (count); 0 reads ahead in threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Muon, its schedule, and what is added to the loss."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the layers' matrices and AdamW for the rest (name)."""
    peak_learning_rate: float
    """Learning rate at the end of warm-up (per step)."""
    final_learning_rate_ratio: float = 0.1
    """Learning rate of the last step (fraction of the peak)."""
    warmup_steps: int
    """Linear rise (optimizer steps)."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """What follows: half a cosine, or the peak until a linear decay at the end (name)."""
    decay_fraction: float = 0.2
    """Length of the linear decay of wsd (fraction of all steps)."""
    beta1: float = 0.9
    """Decay of the first moment (per step); Muon's momentum is muon_beta."""
    beta2: float = 0.95
    """Decay of the second moment (per step)."""
    epsilon: float = 1e-8
    """Added to the root of the second moment (units of the gradient)."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, times the learning rate (per step)."""
    muon_beta: float = 0.95
    """Muon's Nesterov momentum (per step)."""
    muon_update_rms: float = 0.2
    """Muon's update before the learning rate, AdamW's own size, so that both share one rate (root mean square)."""
    clip_norm: float = 1.0
    """Global gradient norm is clipped to this (units of the gradient)."""
    z_loss: float = 0.0
    """Weight of the mean square of the logits' log-sum-exp in the loss (nats per squared nat)."""
    ema_decay: float = 0.0
    """Decay of a moving average of the parameters, held-out losses are its own then (per step); 0 keeps none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run; written beside it as config.json."""

    preset: PresetName
    """Where the other settings start (name)."""
    name: str | None = None
    """Folder under runs_dir (name); None: preset and attention. A name already taken gets the next free number."""
    runs_dir: str = "runs"
    """Folder of all runs (path)."""
    seed: int = 0
    """Seed of initial parameters and of the order of the data (integer)."""
    steps: int
    """Optimizer steps (count)."""
    tokens_per_step: int
    """Tokens of one optimizer step on all devices (tokens): micro_batch * sequence_length * accumulation * shards."""
    micro_batch: int
    """Sequences in one forward and backward pass of each data shard (count)."""
    mesh: str = ""
    """Devices along data, fsdp and tensor, as in data=2,fsdp=4 (counts); empty: all of them along data."""
    distributed: bool = False
    """Several hosts: call jax.distributed.initialize, which finds them from the cluster's environment (switch)."""
    log_every: int = 10
    """Steps between records in metrics.jsonl (optimizer steps); the loss is checked at every step."""
    eval_every: int
    """Steps between held-out losses (optimizer steps); the last step always has one."""
    checkpoint_every: int
    """Steps between checkpoints (optimizer steps); the last step always has one. 0: none at all."""
    keep_checkpoints: int = 3
    """Newest checkpoints that stay on disk (count)."""
    health_every: int
    """Steps between measurements of SageBwd's quantisation (optimizer steps); 0: never."""
    health_tokens: int = 512
    """Tokens of the one held-out sequence that they use (tokens); their memory grows with its square."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: stop, or leave that step out and count it (name)."""
    max_skipped_in_a_row: int = 20
    """Steps left out one after another before the run stops all the same (count)."""
    tensorboard: bool = True
    """Whether the metrics also go to the run's folder tensorboard (switch)."""
    peak_flops: float | None = None
    """What one device can do, for MFU (16-bit FLOP/s); None looks the device up."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig

    def __post_init__(self) -> None:
        from train.config._checks import check  # Here, for it needs these classes.

        check(self)

    def accumulation(self, shards: int) -> int:
        """Micro batches whose gradients are averaged in one step (count), on ``shards`` data shards.

        Raises:
          SettingError: no whole number of them makes tokens_per_step.
        """
        pass_tokens = self.micro_batch * self.data.sequence_length * shards
        if self.tokens_per_step % pass_tokens:
            fewer = ", or the devices fewer: --mesh data=1" if shards > 1 else ""
            raise SettingError(
                f"tokens_per_step={self.tokens_per_step} must be a multiple of micro_batch={self.micro_batch} "
                f"* sequence_length={self.data.sequence_length} * {shards} data shards = {pass_tokens}{fewer}"
            )
        return self.tokens_per_step // pass_tokens

    def with_attention(self, attention: AttentionName) -> "TrainConfig":
        """The same run with another attention."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, attention=attention))

    def to_json(self) -> str:
        """All settings as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Inverse of to_json; refuses unknown and missing settings by name."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise SettingError(f"no JSON: {error}") from error
        for key, section in (("model", ModelConfig), ("data", DataConfig), ("optimizer", OptimizerConfig)):
            if isinstance(values, dict) and isinstance(values.get(key), dict):
                values[key] = _from_dict(section, values[key])
        return _from_dict(cls, values)


# Settings that runs did not have at first, with what they did then.
_LATER = {"ModelConfig": {"logits_dtype": "float32"}}


def _from_dict(cls: Any, values: Any) -> Any:
    """Builds a dataclass from exactly its own fields, each of its own type."""
    if not isinstance(values, dict):
        raise SettingError(f"{values!r} is no object of settings for {cls.__name__}")
    values = _LATER.get(cls.__name__, {}) | values
    kinds = typing.get_type_hints(cls)
    if unknown := sorted(values.keys() - kinds.keys()):
        raise SettingError(f"unknown settings {unknown} for {cls.__name__}; accepted: {sorted(kinds)}")
    if missing := sorted(kinds.keys() - values.keys()):
        raise SettingError(f"missing settings {missing} for {cls.__name__}")
    for name, value in values.items():
        if not _is_a(value, kinds[name]):
            raise SettingError(f"{name}={value!r} is not {kinds[name]} in {cls.__name__}")
    return cls(**values)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value from JSON fits a field's type."""
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is types.UnionType:
        return any(_is_a(value, part) for part in typing.get_args(kind))
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind

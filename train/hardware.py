"""What the machine can do and has used: peak FLOP/s for MFU, and peak memory."""

import resource
import sys
from typing import Any

import jax

from .config import ModelConfig

# Dense 16-bit tensor core FLOP/s of one device with sums in float32, from the makers' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
    "RTX 5090": 209e12,
    "L40S": 362e12,
}


def peak_flops(device: Any) -> float | None:
    """Peak of a device that is known by name; None of any other."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device.device_kind), None)


def flops_per_token(config: ModelConfig, parameters: int, length: int) -> float:
    """Forward and backward: 6 a parameter, and 6 L N H T for causal attention (half of PaLM's 12, arXiv 2204.02311 B).

    The embedding's look-up costs nothing, but tied as it is the table counts once, as the output layer. What is
    computed again in the backward pass does not count.
    """
    return 6.0 * parameters + 6.0 * config.num_layers * config.num_heads * config.head_dim * length


def peak_memory_bytes() -> int:
    """Most memory in use at one time: of the busiest local device, or of this process where devices do not say."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    if peaks:
        return max(peaks)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

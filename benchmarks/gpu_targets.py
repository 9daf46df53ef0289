"""GPUs that kernels are compiled for without having them: what XLA must know of each.

Numbers are the makers' (CUDA programming guide, tables of compute capabilities, and the chips' white papers).
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One GPU.

    Attributes:
      name: one that Pallas and `launch.py` know for this capability: an RTX 3090 goes by A10, an RTX 5090 by RTX PRO
        6000.
      accelerated: has the architecture's own instruction set (sm_90a, sm_100a).
      shared_per_core, shared_per_block: bytes of shared memory of a multiprocessor, and what one block can have of it.
      memory_bandwidth: bytes a second. l2_bytes, memory_bytes: sizes. clock_ghz: boost.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    shared_per_core: int
    shared_per_block: int
    l2_bytes: int
    memory_bandwidth: float
    clock_ghz: float
    memory_bytes: float
    threads_per_core: int
    fpus_per_core: int
    accelerated: bool = False

    def description(self) -> str:
        """The protocol-buffer text that JAX's ahead-of-time compiler takes as `target_config`."""
        major, minor = self.capability
        features = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        return f"""gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: {self.shared_per_core} threads_per_core_limit: {self.threads_per_core}
          core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {int(self.memory_bandwidth)} l2_cache_size: {self.l2_bytes}
          clock_rate_ghz: {self.clock_ghz} device_memory_size: {int(self.memory_bytes)}
          shared_memory_per_block_optin: {self.shared_per_block}
          cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
          dnn_version: "9.12.0"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
        device_description_str: "{self.name}"
        """

    def blocks_per_core(self, registers: int, shared_bytes: int, threads: int) -> int:
        """How many blocks of a kernel one multiprocessor holds at a time."""
        # Registers are handed out 256 at a time to a warp; the system keeps 1 KiB of shared memory for each block.
        per_warp = -(-registers * 32 // 256) * 256
        by_registers = 65536 // (per_warp * threads // 32)
        by_shared = self.shared_per_core // (shared_bytes + 1024)
        return min(by_registers, by_shared, self.threads_per_core // threads)


_DATA_CENTRE: dict[str, Any] = dict(
    shared_per_core=233472, shared_per_block=232448, threads_per_core=2048, accelerated=True
)
_CONSUMER: dict[str, Any] = dict(
    shared_per_core=102400, shared_per_block=101376, threads_per_core=1536, fpus_per_core=128
)

TARGETS = {
    "a100": GpuTarget(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        shared_per_core=167936,
        shared_per_block=166912,
        l2_bytes=41943040,
        memory_bandwidth=1.555e12,
        clock_ghz=1.41,
        memory_bytes=85e9,
        threads_per_core=2048,
        fpus_per_core=64,
    ),
    "rtx3090": GpuTarget(
        name="NVIDIA A10",
        capability=(8, 6),
        cores=82,
        l2_bytes=6291456,
        memory_bandwidth=0.936e12,
        clock_ghz=1.7,
        memory_bytes=24e9,
        **_CONSUMER,
    ),
    "rtx4090": GpuTarget(
        name="NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        cores=128,
        l2_bytes=75497472,
        memory_bandwidth=1.008e12,
        clock_ghz=2.52,
        memory_bytes=24e9,
        **_CONSUMER,
    ),
    "h200": GpuTarget(
        name="NVIDIA H200",
        capability=(9, 0),
        cores=132,
        l2_bytes=52428800,
        memory_bandwidth=4.8e12,
        clock_ghz=1.98,
        memory_bytes=141e9,
        fpus_per_core=128,
        **_DATA_CENTRE,
    ),
    "b200": GpuTarget(
        name="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        l2_bytes=132644864,
        memory_bandwidth=8.0e12,
        clock_ghz=1.965,
        memory_bytes=192e9,
        fpus_per_core=128,
        **_DATA_CENTRE,
    ),
    "rtx5090": GpuTarget(
        name="NVIDIA RTX PRO 6000",
        capability=(12, 0),
        cores=170,
        l2_bytes=100663296,
        memory_bandwidth=1.792e12,
        clock_ghz=2.4,
        memory_bytes=32e9,
        **_CONSUMER,
    ),
}

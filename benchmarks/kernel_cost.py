"""Compile the kernels that `attention` launches for a GPU that is not there, and read what they cost.

Forward and backward pass are traced for the GPU and each kernel in them is compiled ahead of time: XLA states threads
and shared memory in its launch sequence, and the kernel's PTX goes through ptxas for registers and spills. Needs JAX's
CUDA plugin (not the CUDA libraries, not a GPU) and the tools of `cuda_tools.py`.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import re
import tempfile
import threading
from pathlib import Path
from unittest import mock

# The plugin's compiler is wanted, not the CUDA libraries that it would look for when JAX starts.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import cuda_tools
from benchmarks.cases import Case
from benchmarks.gpu_targets import TARGETS
from benchmarks.methods import MASKS, both_passes, call_spec
from benchmarks.traces import single_kernels
from pallas_kernels import tiles
from pallas_kernels.hopper import tiles as hopper_tiles
from sagebwd_jax import SageConfig
from sagebwd_jax._masks import Visibility

# When it is first imported it says in the environment where its library is: not while `_compile` has changed that for a
# while in another thread, which would undo it. Not every jaxlib has it.
with contextlib.suppress(ImportError):
    importlib.import_module("jax.experimental.mosaic.gpu")
# Long enough that no loop is unrolled whole; nothing of this size is ever allocated.
_BATCH, _LENGTH, _HEADS = 2, 8192, 2
# No tile divides this one, so that every kernel has a loop over whole tiles and one over those at an end.
_RAGGED_LENGTH = 8100
_PREFIX = "sagebwd_"
# What Mosaic GPU is told by its environment to write: assembly, and the host's code, which says how it is launched.
_MOSAIC_FILES = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_HOST_LLVM")
_one_at_a_time = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCost:
    """What one kernel takes of a GPU.

    Attributes:
      registers: per thread. spilled: bytes per thread stored to memory for want of registers.
      shared_bytes: dynamic shared memory of a block; shared_limit: what a block can have on this GPU.
      threads: of a block. blocks_per_core: blocks that one multiprocessor holds at a time.
      instructions: of the hottest loop per score that a thread computes, by kind; empty for kernels without one, and
        where it was not asked for.
    """

    registers: int
    spilled: int
    shared_bytes: int
    shared_limit: int
    threads: int
    blocks_per_core: int
    instructions: dict[str, float] = dataclasses.field(default_factory=dict)


class CompilerRefusal(Exception):
    """The compiler refuses a kernel, for example since it needs more shared memory than a block can have."""


def compile_kernel(
    gpu: str,
    kernel: str,
    depth: int,
    causal: bool,
    config: SageConfig,
    masks: str | None = None,
    *,
    dtype: str = "bfloat16",
    ragged: bool = False,
    with_loop: bool = False,
) -> KernelCost:
    """The cost of one kernel, named as in `kernel_names`; `masks` is a key of `methods.MASKS`.

    `dtype` is that of the inputs; `ragged` is for lengths that no tile divides.

    Raises:
      ValueError: an unknown GPU, or a kernel that this config does not launch.
      CompilerRefusal: see there.
    """
    traced = _trace(gpu, depth, causal, config, masks, dtype, ragged)
    if kernel not in traced.kernels:
        raise ValueError(f"{kernel=} is not launched by this config: {', '.join(traced.kernels)} are")
    with tempfile.TemporaryDirectory(prefix="kernel_cost_") as name:
        folder, target = Path(name), TARGETS[gpu]
        function, shapes = traced.kernels[kernel]
        _compile(function, shapes, traced.mesh, folder)
        threads, shared_bytes = _launch(folder)
        [ptx] = [path for path in folder.glob("*.ptx") if f".entry {_PREFIX}" in path.read_text()]
        cubin, registers, spilled = cuda_tools.assemble(ptx)
        loop = cuda_tools.hottest_loop(cubin) if with_loop and kernel in traced.scores else {}
        return KernelCost(
            registers=registers,
            spilled=spilled,
            shared_bytes=shared_bytes,
            shared_limit=target.shared_per_block,
            threads=threads,
            blocks_per_core=target.blocks_per_core(registers, shared_bytes, threads),
            instructions={kind: count / traced.scores[kernel] for kind, count in loop.items()},
        )


def kernel_names(
    gpu: str, depth: int, causal: bool, config: SageConfig, masks: str | None = None, *, dtype: str = "bfloat16"
) -> list[str]:
    """The kernels of one forward and backward pass, without "sagebwd_"; the second of one name ends in "_2"."""
    return list(_trace(gpu, depth, causal, config, masks, dtype).kernels)


@dataclasses.dataclass(frozen=True)
class _Trace:
    """The kernels for one GPU, as functions with their shapes, and the scores of a tile that a thread computes."""

    mesh: jax.sharding.Mesh
    kernels: dict
    scores: dict[str, float]


@functools.cache
def _trace(gpu, depth, causal, config, masks=None, dtype="bfloat16", ragged=False) -> _Trace:
    """Trace both passes for a GPU, without compiling anything."""
    if gpu not in TARGETS:
        raise ValueError(f"{gpu=}: known are {', '.join(TARGETS)}")
    mesh = topologies.make_mesh(_topology(TARGETS[gpu].description()), (1,), ("x",))
    case = Case(depth=depth, length=_LENGTH, causal=causal, batch=_BATCH, heads=_HEADS)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        length = _RAGGED_LENGTH if ragged else _LENGTH
        kernels = single_kernels(*both_passes(case, config, masks, length=length, dtype=dtype))
        visibility = Visibility(**MASKS[masks](case)[0]) if masks else None
        return _Trace(mesh, kernels, _scores_a_thread(call_spec(case, config), case, visibility, dtype))


def _topology(description, topology="1x1x1"):
    """One GPU of this description, or as many as the topology says, as JAX's ahead-of-time compiler knows it."""
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=description, topology=topology)
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX has no CUDA compiler in this process: install jax[cuda13-local], and import benchmarks.kernel_cost "
            "before JAX starts, or set JAX_PLATFORMS=cpu"
        ) from error


def _scores_a_thread(spec, case, visibility, dtype) -> dict[str, float]:
    """How many scores of a tile a thread computes in each attention kernel, for the GPU that is compiled for."""
    depth, config = case.depth, spec.config
    joint, tile_k, tile_v = tiles.grad_kv_tiles(spec, depth, visibility)
    q = "grad_q" if spec.uses_int8("dq") else "grad_q_16"
    chosen = {"forward": ("forward", tiles.forward_tile(spec, depth, visibility), config.pv_span)}
    chosen |= {"grad_q": (q, tiles.grad_q_tile(spec, depth, visibility), config.dq_span)}
    if joint:
        chosen |= {"grad_kv": ("grad_kv_16", tile_k, hopper_tiles.GROUP)}
    else:
        chosen |= {"grad_k": ("grad_k", tile_k, config.dk_span), "grad_v": ("grad_v", tile_v, config.dv_span)}
    like, scores = jax.ShapeDtypeStruct(case.shape, dtype), {}
    # Its hottest loop is that of the groups that own keys.
    if hopper_tiles.find("grad_qkv", spec, visibility, like.dtype, like) is not None:
        scores["grad_qkv"] = hopper_tiles.GROUP * config.dk_span / 128
    for name, (row, tile, span) in chosen.items():
        if hopper_tiles.find(row, spec, visibility, like.dtype, like) is not None:
            scores[name] = hopper_tiles.GROUP * span / 128
        else:
            scores[name] = tile.block_q * tile.block_k / (32 * tile.num_warps)
    return scores


def _compile(kernel, shapes, mesh, folder):
    """Compile one kernel ahead of time; XLA's files go to `folder`."""
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
    # "ptx" names no emitter: it leaves only the PTX, which the releases from 0.11 on write if this option is set.
    # The level is XLA's default, said for where XLA_FLAGS lowers it: registers depend on it.
    options: dict[str, str | bool] = {
        "xla_dump_to": str(folder),
        "xla_dump_emitter_re": "ptx",
        "xla_backend_optimization_level": "3",
    }
    with _one_at_a_time, mock.patch.dict(os.environ, dict.fromkeys(_MOSAIC_FILES, "1"), MOSAIC_GPU_DUMP_TO=str(folder)):
        _compile_to(kernel, shapes, mesh, options)


def _compile_to(kernel, shapes, mesh, options):
    """Lower and compile; the environment says what Mosaic GPU writes, `options` what XLA does."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(kernel).lower(*shapes)
        try:
            lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise CompilerRefusal(str(error).removesuffix(", context: []")) from error


def _launch(folder) -> tuple[int, int]:
    """Threads and bytes of shared memory of our one kernel, from XLA's launch sequence or Mosaic GPU's host code."""
    for host in folder.glob(f"{_PREFIX}*.ll"):
        # After the context three numbers of blocks, three of the cluster, three of threads, and shared memory.
        numbers = re.search(r"call \w+ @mosaic_gpu_\w*kernel\w*\(ptr %\w+((?:, i32 \d+){10})", host.read_text())
        if numbers is not None:
            launch = [int(x) for x in re.findall(r"i32 (\d+)", numbers[1])]
            return launch[6], launch[9]
    [sequence] = folder.glob("*thunk_sequence.txt")
    pattern = rf"{_PREFIX}\w+ grid: .*? threads: \[(\d+), 1, 1\] +shared_memory: (\d+) bytes"
    launches = re.findall(pattern, sequence.read_text())
    if len(launches) != 1:
        raise RuntimeError(f"XLA's launch sequence should name one kernel {_PREFIX}*, but has {len(launches)}")
    return int(launches[0][0]), int(launches[0][1])

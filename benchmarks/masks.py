"""``python -m benchmarks.masks``: device time of masked attention beside the plain causal call, and cuDNN's if it can.

Forward plus backward, bfloat16, B*T = 16384, N*H = 2048, quantisation included, timed as `speed.py` does. A window or
packed documents cost O(T W), not O(T^2): their rows at several lengths show it. Each result is compared with exact
float32 attention under the same masks, on one head of one sequence, before it counts. Rows go to
results/masks_<device>.json.
"""

import argparse
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases, records, timing
from benchmarks.oracle import exact_head, max_error
from benchmarks.speed import draw_inputs
from pallas_kernels import launch
from sagebwd_jax import SageConfig, attention

WINDOW = 1024
METHODS = {
    "sagebwd": ("int8", functools.partial(attention, implementation="triton")),
    "sagebwd mixed": ("int8", functools.partial(attention, implementation="triton", config=SageConfig.mixed())),
    "cuDNN": ("16-bit", functools.partial(jax.nn.dot_product_attention, implementation="cudnn")),
}


def _documents(case, tokens):
    """Segment ids [B, T] of documents of so many tokens each."""
    ids = jnp.broadcast_to(jnp.arange(case.length, dtype=jnp.int32) // tokens, (case.batch, case.length))
    return dict(query_segment_ids=ids, key_value_segment_ids=ids)


def _blocks(case):
    """A mask that no other argument can say: keys of even documents only, or a query's own."""
    document = np.arange(case.length) // (case.length // 16)
    return jnp.asarray((document[None, :] % 2 == 0) | (document[:, None] == document[None, :]))[None, None]


# Arguments of `attention` besides is_causal=True, made from a case: a mask's name tells what it is.
MASKS: dict[str, Callable[[cases.Case], dict]] = {
    "none": lambda case: {},
    f"window of {WINDOW}": lambda case: dict(local_window_size=(WINDOW - 1, 0)),
    f"documents of {WINDOW}": lambda case: _documents(case, WINDOW),
    "half of it padding": lambda case: dict(key_value_seq_lengths=jnp.full(case.batch, case.length // 2, jnp.int32)),
    "boolean mask [1, 1, T, S]": lambda case: dict(mask=_blocks(case)),
    "bias [1, N, T, S]": lambda case: dict(
        bias=jax.random.normal(jax.random.key(9), (1, case.heads, case.length, case.length)).astype(jnp.bfloat16)
    ),
}
# A mask or a bias of every query and key takes memory O(T^2): short sequences alone.
_DENSE_UP_TO = 4096
# cuDNN's segment ids are no argument of jax.nn's.
_NOT_CUDNN = (f"documents of {WINDOW}",)


def _is_dense(mask):
    return "T, S" in mask


def both_passes(attend, numbers: dict) -> Callable:
    """(query, key, value, dout, arrays) -> (O, dQ, dK, dV), causal and under the masks that both make up."""

    def run(query, key, value, dout, arrays):
        out, vjp = jax.vjp(functools.partial(attend, is_causal=True, **numbers, **arrays), query, key, value)
        return (out, *vjp(dout))

    return run


def exact(inputs, masks: dict):
    """(O, dQ, dK, dV) in float32 of the first head of the first sequence."""
    window, dense = (
        masks.get("local_window_size"),
        {name: masks[name][0, 0] for name in ("mask", "bias") if name in masks},
    )
    rows = {
        new: masks[old][0]
        for new, old in {"segments": "query_segment_ids", "key_length": "key_value_seq_lengths"}.items()
        if old in masks
    }
    first = (x[0, :, 0] for x in inputs)
    return exact_head(*first, is_causal=True, window=window and window[0], **dense, **rows)


def measure_case(case, mask: str, methods, *, calls=None, lock=None):
    """A record for every method."""
    numbers, shapes = {}, [jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)] * 4

    def make_arrays():
        masks = MASKS[mask](case)
        numbers.update({name: value for name, value in masks.items() if not isinstance(value, jax.Array)})
        return {name: value for name, value in masks.items() if name not in numbers}

    array_shapes = jax.eval_shape(make_arrays)
    count = calls or timing.calls_per_execution(cases.flops(case, "forward+backward"))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {
            name: pool.submit(
                contextvars.copy_context().run,
                timing.compile_repeated,
                both_passes(METHODS[name][1], numbers),
                [*shapes, array_shapes],
                count,
            )
            for name in methods
            if not (name == "cuDNN" and mask in _NOT_CUDNN)
        }
    with timing.alone(lock):
        inputs, arrays = draw_inputs(case), make_arrays()
        wanted = exact(inputs, numbers | arrays)
        for name, job in jobs.items():
            try:
                seconds, results = timing.time_compiled(job.result(), (*inputs, arrays), count)
                worst, bound = max_error(results, wanted), cases.ERROR_BOUND[METHODS[name][0]]
                row = dict(milliseconds=1e3 * seconds, max_error=worst, error=None)
                if not worst <= bound:
                    row |= dict(milliseconds=None, error=f"relative error {worst:.3g} is above {bound}")
            except Exception as error:  # One failing method must not end the run, whatever it raises.
                row = dict(milliseconds=None, max_error=None, error=f"{type(error).__name__}: {str(error)[:300]}")
            yield {"method": name, "masks": mask, **dataclasses.asdict(case), **row}


def main(arguments=None):
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description="Device time under masks.")
    parser.add_argument("--lengths", type=int, nargs="+", default=(4096, 8192, 32768), help="lengths to time")
    parser.add_argument("--depths", type=int, nargs="+", default=cases.DEPTHS, help="head dims to time")
    parser.add_argument("--masks", nargs="+", help=f"only masks whose name holds one of these: {', '.join(MASKS)}")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the results")
    parser.add_argument("--lock", type=Path, help=timing.LOCK_HELP)
    parser.add_argument("--commit", help="what to record as the commit, where the tree has no git")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen_masks = [name for name in MASKS if any(part.lower() in name.lower() for part in options.masks or [""])]
    if not chosen_masks:
        parser.error(f"--masks {' '.join(options.masks)}: none of {', '.join(MASKS)} holds that")
    device = jax.devices()[0]
    if not options.dry_run and device.platform != "gpu":
        sys.exit(f"benchmarks.masks times an NVIDIA GPU; JAX's default device here is {device.device_kind!r}")
    chosen, methods, extra = cases.make_cases(options.lengths, options.depths, (True,)), METHODS, {}
    if options.dry_run:
        chosen = cases.make_cases((256,), (64,), (True,), tokens=256, channels=128)
        methods, extra = ("sagebwd mixed",), dict(calls=1)
    provenance, rows = cases.make_provenance(device.device_kind, options.commit), []
    path = options.output / f"masks_{'dry_run' if options.dry_run else records.device_slug(device.device_kind)}.json"
    with launch.interpreted() if options.dry_run else contextlib.nullcontext():
        for case in chosen:
            for mask in chosen_masks:
                if _is_dense(mask) and case.length > _DENSE_UP_TO:
                    continue
                for row in measure_case(case, mask, methods, lock=options.lock, **extra):
                    rows.append({**row, **provenance})
                    records.write_json(path, rows)
                    result = row["error"] or f"{row['milliseconds']:9.3f} ms  error {row['max_error']:.4f}"
                    print(f"{case!s:20s} {row['masks']:26s} {row['method']:14s} {result}", flush=True)
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()

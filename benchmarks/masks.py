"""``python -m benchmarks.masks``: device time of masked attention beside the plain causal call, and cuDNN's if it can.

Forward plus backward, bfloat16, B*T = 16384, N*H = 2048, quantisation included, timed as `speed.py` does. A window or
packed documents cost O(T W), not O(T^2): their rows at several lengths show it. Each result is compared with exact
float32 attention under the same masks, on one head of one sequence, before it counts. Rows go to
results/masks_<device>.json.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases, records, timing
from benchmarks.methods import Method, is_wanted, jax_methods, whole_pass
from benchmarks.oracle import exact_head
from benchmarks.speed import Job, attempt, compile_all, draw_inputs
from pallas_kernels import launch

WINDOW = 1024
METHODS = ("sagebwd", "sagebwd mixed", "cuDNN")


def _documents(case, tokens):
    """Segment ids [B, T] of documents of so many tokens each."""
    ids = jnp.broadcast_to(jnp.arange(case.length, dtype=jnp.int32) // tokens, (case.batch, case.length))
    return dict(query_segment_ids=ids, key_value_segment_ids=ids)


def _blocks(case):
    """A mask that no other argument can say: keys of even documents only, or a query's own."""
    document = np.arange(case.length) // (case.length // 16)
    return jnp.asarray((document[None, :] % 2 == 0) | (document[:, None] == document[None, :]))[None, None]


# Arrays that `attention` is given besides, made from a case: a mask's name tells what it is. The window is in numbers.
MASKS: dict[str, Callable[[cases.Case], dict]] = {
    "none": lambda case: {},
    f"window of {WINDOW}": lambda case: {},
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


def _window(mask):
    """What a mask says of `local_window_size`."""
    return (WINDOW - 1, 0) if mask.startswith("window") else None


def _under(method: Method, mask, arrays) -> Method:
    """The method with these arguments."""
    attend = functools.partial(method.attend, local_window_size=_window(mask), **arrays)
    return dataclasses.replace(method, attend=attend)


def _compile(case, method, mask, calls) -> Job:
    """The forward and backward pass; the mask's arrays come after the inputs, for XLA to know nothing of them."""

    def run(query, key, value, dout, arrays):
        return whole_pass(_under(method, mask, arrays), "forward+backward", case)(query, key, value, dout)

    shapes = [*[jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)] * 4, jax.eval_shape(lambda: MASKS[mask](case))]
    return Job(run=timing.compile_repeated(run, shapes, calls), prepare=None, calls=calls)


def exact(inputs, mask, arrays: dict):
    """(O, dQ, dK, dV) in float32 of the first head of the first sequence."""
    names = {"segments": "query_segment_ids", "key_length": "key_value_seq_lengths"}
    rows = {new: arrays[old][0] for new, old in names.items() if old in arrays}
    dense = {name: arrays[name][0, 0] for name in ("mask", "bias") if name in arrays}
    window = _window(mask)
    return exact_head(*(x[0, :, 0] for x in inputs), is_causal=True, window=window and window[0], **dense, **rows)


def measure_case(case, mask: str, methods: list[Method], *, calls=None, lock=None):
    """A record for every method."""
    count = calls or timing.calls_per_execution(cases.flops(case, "forward+backward"))
    takers = [method for method in methods if not (method.name == "cuDNN" and mask in _NOT_CUDNN)]
    jobs = compile_all({method: functools.partial(_compile, case, method, mask, count) for method in takers})
    with timing.alone(lock):
        inputs, arrays = draw_inputs(case), MASKS[mask](case)
        wanted = exact(inputs, mask, arrays)
        for method, job in jobs.items():
            row = attempt(job, method, (*inputs, arrays), wanted)
            milliseconds = 1e3 * row["seconds"] if "seconds" in row else None
            found = dict(milliseconds=milliseconds, max_error=row.get("max_error"), error=row.get("error"))
            yield {"method": method.name, "masks": mask, **dataclasses.asdict(case), **found}


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
    chosen_masks = [name for name in MASKS if is_wanted(name, options.masks)]
    if not chosen_masks:
        parser.error(f"--masks {' '.join(options.masks)}: none of {', '.join(MASKS)} holds that")
    device = jax.devices()[0]
    if not options.dry_run and device.platform != "gpu":
        sys.exit(f"benchmarks.masks times an NVIDIA GPU; JAX's default device here is {device.device_kind!r}")
    chosen, names, extra = cases.make_cases(options.lengths, options.depths, (True,)), METHODS, {}
    if options.dry_run:
        chosen = cases.make_cases((256,), (64,), (True,), tokens=256, channels=128)
        names, extra = ("sagebwd mixed",), dict(calls=1)
    methods = [method for method in jax_methods() if method.name in names]
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

"""``python -m benchmarks.costs``: what attention costs besides time: bytes kept for the backward pass, compilation.

Kept bytes are those of the residuals of `jax.vjp`, inputs among them, per value of the output; a model that needs its
inputs otherwise pays for those anyway. First compilation is the host's time for forward plus backward, from the traced
function to the executable, without any cache.
"""

import argparse
import functools
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend import core

from benchmarks import cases, records
from benchmarks.methods import Method, is_wanted, jax_methods, whole_pass


def kept_bytes(attend, shapes) -> int:
    """Bytes of what `attend`'s forward pass leaves for its backward pass, each array once."""

    def residuals(*inputs):
        return jax.tree.leaves(jax.vjp(attend, *inputs)[1])

    jaxpr = jax.make_jaxpr(residuals)(*shapes).jaxpr
    arrays = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, core.Literal))
    return sum(v.aval.size * v.aval.dtype.itemsize for v in arrays)


def measure(case: cases.Case, method: Method) -> dict:
    """One record: the method's kept bytes per output value, and the seconds of its first compilation."""
    shapes = [jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)] * 4
    jax.clear_caches()
    kept = kept_bytes(functools.partial(method.attend, is_causal=case.causal), shapes[:3])
    lowered = jax.jit(whole_pass(method, "forward+backward", case)).lower(*shapes)
    start = time.perf_counter()
    lowered.compile()
    seconds = time.perf_counter() - start
    return dict(
        method=method.name,
        depth=case.depth,
        length=case.length,
        causal=case.causal,
        kept_bytes_per_value=kept / math.prod(case.shape),
        first_compilation_seconds=seconds,
    )


def main(arguments=None):
    """Measure every method, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description="Kept bytes and compilation.")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--methods", nargs="+", help="only methods whose name holds one of these, in any case")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the results")
    parser.add_argument("--commit", help="what to record as the commit, where the tree has no git")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    if not options.dry_run and device.platform != "gpu":
        sys.exit(f"benchmarks.costs compiles for an NVIDIA GPU; JAX's default device here is {device.device_kind!r}")
    # A cache on disk would make the second run of this program the fast one.
    jax.config.update("jax_enable_compilation_cache", False)
    methods = jax_methods("xla", dry=True) if options.dry_run else jax_methods()
    methods = [method for method in methods if is_wanted(method.name, options.methods)]
    sizes = dict(tokens=256, channels=128) if options.dry_run else {}
    provenance, rows = cases.make_provenance(device.device_kind, options.commit), []
    for case in cases.make_cases((options.length,), cases.DEPTHS, **sizes):
        for method in methods:
            row = measure(case, method)
            rows.append({**row, **provenance})
            kept, seconds = row["kept_bytes_per_value"], row["first_compilation_seconds"]
            print(
                f"{case!s:18s} {method.name:20s} {kept:6.2f} bytes a value, first compilation {seconds:6.2f} s",
                flush=True,
            )
    path = options.output / f"costs_{'dry_run' if options.dry_run else records.device_slug(device.device_kind)}.json"
    records.write_json(path, rows)
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()

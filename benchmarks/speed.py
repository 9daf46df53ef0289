"""``python -m benchmarks.speed``: device time of SageBwd and of 16-bit attention on the NVIDIA GPU of this machine.

Timed are, for `SageConfig()` and `SageConfig.mixed()`, the forward pass and forward plus backward with quantisation
included (through `attention` and `jax.vjp`), and the attention kernels alone on operands that are ready; and the peers
that are installed: cuDNN and Pallas' mha through JAX, tokamax, and PyTorch's FlashAttention-2 and cuDNN. bfloat16,
[B, T, N, H], B*T = 16384, N*H = 2048. How is said in `timing.py` (JAX) and `torch_peers.py` (PyTorch).

No time without a check: the timed computation's own results are compared with exact float32 attention, on one head.
A method that fails, or is wrong, is a row with an error. Rows are saved as they come, to results/speed_<device>.json.
"""

import argparse
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

# PyTorch is measured on the same GPU; must be set before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from benchmarks import cases, records, timing
from benchmarks.methods import is_wanted, jax_methods, kernel_pass, whole_pass
from benchmarks.oracle import exact_head, max_error
from benchmarks.torch_peers import BACKENDS
from pallas_kernels import launch

_TORCH_SECONDS = 240


class Results:
    """The rows so far, printed and saved as they come."""

    def __init__(self, path: Path, provenance: dict):
        self.path, self.provenance, self.rows = path, provenance, []
        self._start = time.monotonic()

    def add(self, row: dict):
        """Keep a row, which may lack what every row of the run shares."""
        row = {**self.provenance, **row}
        self.rows.append(row)
        records.write_json(self.path, self.rows)
        shape = f"H={row['depth']} T={row['length']}{' causal' if row['causal'] else ''}"
        if row["error"] is None:
            result = f"{row['milliseconds']:9.3f} ms {row['tflops']:7.1f} TFLOP/s  error {row['max_error']:.4f}"
        else:
            result = row["error"].splitlines()[0][:120]
        self.note(f"{shape:22s} {row['method']:27s} {row['pass']:17s} {result}")

    def note(self, text: str):
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", flush=True)


def draw_inputs(case: cases.Case):
    """Query, key, value and dout, standard normal: drawn in float32, since normal draws in bfloat16 are too coarse."""
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, case.shape, jnp.float32).astype(jnp.bfloat16) for key in keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One pass of one method on one case, compiled: `prepare` makes what `run` is timed on, None if the inputs are."""

    run: jax.stages.Compiled
    prepare: jax.stages.Compiled | None
    calls: int


def compile_job(case, method, pass_, calls) -> Job:
    """Compile what is timed; touches no device, so that many can run at once."""
    inputs = [jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)] * 4
    if "kernels" not in pass_:
        run = timing.compile_repeated(whole_pass(method, pass_, case), inputs, calls)
        return Job(run=run, prepare=None, calls=calls)
    prepare, run = kernel_pass(method, pass_, case)
    compiled = jax.jit(prepare).lower(*inputs).compile()
    return Job(run=timing.compile_repeated(run, jax.eval_shape(prepare, *inputs), calls), prepare=compiled, calls=calls)


def wanted_results(pass_, wanted):
    """Those of the oracle's (O, dQ, dK, dV) that a pass returns."""
    return {"forward": wanted[:1], "forward kernels": wanted[:1], "backward kernels": wanted[1:]}.get(pass_, wanted)


def time_job(job: Job, method, inputs, wanted) -> dict:
    """Run a compiled job, check what it returned, and time it if that is right."""
    operands = inputs if job.prepare is None else job.prepare(*inputs)
    seconds, results = timing.time_compiled(job.run, operands, job.calls)
    results = (results,) if isinstance(results, jax.Array) else results
    error, bound = max_error(results, wanted), cases.ERROR_BOUND[method.precision]
    if not error <= bound:
        return dict(max_error=error, error=f"relative error {error:.3g} is above {bound}")
    return dict(seconds=seconds, max_error=error)


def compile_all(compilations: dict) -> dict:
    """Run every function that returns a Job in a thread of its own; a future of each, done."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return {key: pool.submit(contextvars.copy_context().run, one) for key, one in compilations.items()}


def attempt(job: concurrent.futures.Future, method, inputs, wanted) -> dict:
    """What `time_job` returns, or why there is nothing: one failing method must not end the run, whatever it raises."""
    try:
        return time_job(job.result(), method, inputs, wanted)
    except Exception as error:
        return dict(error=f"{type(error).__name__}: {str(error)[:300]}")


def measure_case(case, methods, results: Results, *, calls=None, lock=None):
    """Compile every method's passes at once, then time one after the other."""
    compilations = {}
    for method in methods:
        for pass_ in method.passes(case.depth):
            count = calls or timing.calls_per_execution(cases.flops(case, pass_))
            compilations[method, pass_] = functools.partial(compile_job, case, method, pass_, count)
    jobs = compile_all(compilations)
    results.note(f"{case}: compiled {len(jobs)} computations")
    with timing.alone(lock):
        inputs = draw_inputs(case)
        wanted = exact_head(*(x[0, :, 0] for x in inputs), is_causal=case.causal)
        for (method, pass_), job in jobs.items():
            row = attempt(job, method, inputs, wanted_results(pass_, wanted))
            results.add(cases.make_record(case, method.name, pass_, {}, **row))


def measure_torch(chosen, backends, results: Results):
    """PyTorch's rows, from a process of its own."""
    if importlib.util.find_spec("torch") is None:
        results.note("PyTorch is not installed")
        return
    shapes = json.dumps([dataclasses.asdict(case) for case in chosen])
    command = [sys.executable, "-m", "benchmarks.torch_peers", shapes, *backends]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(_TORCH_SECONDS, process.kill)
        watchdog.start()
        for line in process.stdout:
            if line.startswith("{"):
                results.add(json.loads(line))
        watchdog.cancel()
    if process.returncode:
        results.note(f"PyTorch's process ended with {process.returncode}; it has {_TORCH_SECONDS} s")


def print_table(rows):
    """TFLOP/s, a column a length."""
    lengths = sorted({row["length"] for row in rows})
    print("\nTFLOP/s; the passes called kernels leave out quantisation; - where a method failed")
    groups = dict.fromkeys((row["depth"], row["causal"], row["pass"]) for row in rows)
    for depth, causal, pass_ in sorted(groups):
        print(f"\nH={depth}{', causal' if causal else ''}, {pass_}".ljust(46) + "".join(f"{t:>8d}" for t in lengths))
        same = [r for r in rows if (r["depth"], r["causal"], r["pass"]) == (depth, causal, pass_)]
        for method in dict.fromkeys(row["method"] for row in same):
            speeds = {row["length"]: row["tflops"] for row in same if row["method"] == method}
            cells = ("-" if speeds.get(t) is None else f"{speeds[t]:.0f}" for t in lengths)
            print(f"  {method:42s}" + "".join(f"{cell:>8s}" for cell in cells))


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description="Device time of SageBwd and its peers."
    )
    parser.add_argument("--quick", action="store_true", help=f"lengths {cases.QUICK_LENGTHS} only")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths to time")
    parser.add_argument("--depths", type=int, nargs="+", default=cases.DEPTHS, help="head dims to time")
    parser.add_argument("--methods", nargs="+", help="only methods whose name holds one of these, in any case")
    parser.add_argument("--no-torch", action="store_true", help="leave out PyTorch")
    parser.add_argument("--plots", action="store_true", help="draw bar plots of the rows beside the JSON file")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the results")
    parser.add_argument("--lock", type=Path, help=timing.LOCK_HELP)
    parser.add_argument("--commit", help="what to record as the commit, where the tree has no git")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments=None):
    """Measure, print and save."""
    options = parse(arguments)
    device = jax.devices()[0]
    if options.dry_run:
        chosen = cases.make_cases((128,), (64,), (True,), tokens=256, channels=128)
        methods, extra = jax_methods("xla", dry=True), dict(calls=2)
    else:
        if device.platform != "gpu":
            sys.exit(f"benchmarks.speed times an NVIDIA GPU; JAX's default device here is {device.device_kind!r}")
        lengths = options.lengths or (cases.QUICK_LENGTHS if options.quick else cases.LENGTHS)
        chosen = cases.make_cases(lengths, options.depths)
        methods, extra = jax_methods(), {}

    methods = [method for method in methods if is_wanted(method.name, options.methods)]
    path = options.output / f"speed_{'dry_run' if options.dry_run else records.device_slug(device.device_kind)}.json"
    results = Results(path, cases.make_provenance(device.device_kind, options.commit))
    backends = [name for name in BACKENDS if is_wanted(name, options.methods)]
    # First: a run that is cut short then has what the others are compared with.
    if backends and not options.dry_run and not options.no_torch:
        with timing.alone(options.lock):
            measure_torch(chosen, backends, results)
    with launch.interpreted() if options.dry_run else contextlib.nullcontext():
        for case in chosen:
            measure_case(case, methods, results, lock=options.lock, **extra)
    print_table(results.rows)
    print(f"\n{len(results.rows)} rows in {path}")
    if options.plots:
        from benchmarks.plots import plot_speed

        for plot in plot_speed(results.rows, options.output):
            print(plot)


if __name__ == "__main__":
    main()

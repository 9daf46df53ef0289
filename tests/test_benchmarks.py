"""The benchmarks' own arithmetic, and a dry run of each on the CPU."""

import dataclasses
import json
import threading
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_inputs

from benchmarks import (
    accuracy,
    cases,
    costs,
    cuda_tools,
    gpu_targets,
    masks,
    methods,
    oracle,
    plots,
    records,
    speed,
    tables,
    timing,
    traces,
    tune,
)
from pallas_kernels import attention as kernels
from pallas_kernels import launch, tiles
from sagebwd_jax import SageConfig
from sagebwd_jax.reference import exact_attention_and_grads

ROW_KEYS = {
    *("method", "pass", "depth", "length", "causal", "batch", "heads", "milliseconds", "tflops", "max_error", "error"),
    *("device", "versions", "commit", "date"),
}


def test_flops_by_hand():
    # 8 queries and keys at depth 16: Q K^T and P V are 8*8 dot products of 16 terms and 8*16 of 8, two FLOPs a term.
    case = cases.Case(depth=16, length=8, causal=False, batch=3, heads=5)
    forward = 15 * (2 * 8 * 8 * 16 + 2 * 8 * 16 * 8)
    assert cases.flops(case, "forward") == forward
    assert cases.flops(case, "backward kernels") == 2.5 * forward
    assert cases.flops(case, "forward+backward") == 3.5 * forward
    causal = cases.Case(depth=16, length=8, causal=True, batch=3, heads=5)
    assert cases.flops(causal, "forward kernels") == forward / 2


def test_cases_hold_tokens_and_channels_constant():
    made = cases.make_cases(cases.LENGTHS, cases.DEPTHS)
    assert len(made) == 28 and cases.LENGTHS[0] == 512 and cases.LENGTHS[-1] == 32768
    assert {case.heads * case.depth for case in made} == {2048}
    assert {case.batch * case.length for case in made if case.length <= 16384} == {16384}
    assert {case.batch for case in made if case.length == 32768} == {1}


def test_a_record_gives_speed_or_the_reason_for_none():
    case = cases.Case(depth=64, length=8192, causal=True, batch=2, heads=32)
    provenance = cases.make_provenance("NVIDIA H200", "abc")
    row = cases.make_record(case, "sagebwd", "forward", provenance, seconds=1e-3, max_error=0.02)
    # 4 * 2 * 32 * 8192^2 * 64 / 2 operations in a millisecond.
    assert row["tflops"] == pytest.approx(549.76, abs=0.01)
    assert row.keys() == ROW_KEYS and row["milliseconds"] == 1 and row["commit"] == "abc"
    failed = cases.make_record(case, "cuDNN", "forward", provenance, error="no GPU")
    assert failed["tflops"] is None and failed["error"] == "no GPU"


def test_device_names_as_file_names():
    assert records.device_slug("NVIDIA H200") == "h200"
    assert records.device_slug("NVIDIA GeForce RTX 4090") == "rtx_4090"


def test_repeated_calls_really_run_and_keep_their_inputs():
    calls = []

    def function(x):
        jax.debug.callback(lambda: calls.append(1))
        return x + 1

    compiled = timing.compile_repeated(function, (jnp.zeros(3),), calls=5)
    seconds, result = timing.time_compiled(compiled, (jnp.zeros(3),), calls=5, executions=2)
    jax.effects_barrier()
    assert len(calls) == 15 and seconds > 0
    np.testing.assert_array_equal(result, np.ones(3))


@pytest.mark.parametrize("mask", masks.MASKS)
def test_the_blockwise_oracle_is_the_dense_one(mask):
    case = cases.Case(depth=16, length=2048, causal=True, batch=1, heads=1)
    inputs = [jax.random.normal(jax.random.key(i), case.shape) for i in range(4)]
    arrays = masks.MASKS[mask](case)
    options = arrays | dict(local_window_size=masks._window(mask))
    dense = jax.jit(lambda *x: exact_attention_and_grads(*x, is_causal=True, **options))(*inputs)
    wanted = [x[0, :, 0] for x in (dense.out, dense.dq, dense.dk, dense.dv)]
    got = masks.exact(inputs, mask, arrays)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_largest_error_does_not_lose_a_nan():
    good, bad = jnp.ones((1, 4, 1, 2)), jnp.full((1, 4, 1, 2), jnp.nan)
    want = jnp.ones((4, 2))
    assert oracle.max_error([good, good], [want, 2 * want]) == pytest.approx(0.5)
    assert np.isnan(oracle.max_error([good, bad, good], [want] * 3))


def test_speed_dry_run_saves_a_checked_row_for_each_pass(tmp_path):
    speed.main(["--dry-run", "--methods", "mixed", "XLA", "--output", str(tmp_path), "--plots"])
    rows = json.loads((tmp_path / "speed_dry_run.json").read_text())
    assert all(row.keys() == ROW_KEYS for row in rows)
    assert [row["error"] for row in rows] == [None] * 6
    assert [row["pass"] for row in rows if row["method"] == "sagebwd mixed"] == list(cases.PASSES)
    assert all(row["milliseconds"] > 0 and 0 < row["max_error"] < 0.03 for row in rows)
    assert [path.name for path in tmp_path.glob("*.png")] == ["speed_cpu_d64.png"]


def test_a_failing_method_is_a_row_and_the_next_still_runs(tmp_path):
    def fails(query, key, value, *, is_causal):
        raise RuntimeError("no such kernel")

    def wrong(query, key, value, *, is_causal):
        return value

    chosen = [
        methods.Method(name=name, precision="16-bit", attend=attend)
        for name, attend in {"fails": fails, "wrong": wrong, "right": jax.nn.dot_product_attention}.items()
    ]
    [case] = cases.make_cases((64,), (32,), (True,), tokens=64, channels=32)
    results = speed.Results(tmp_path / "rows.json", cases.make_provenance("cpu", None))
    speed.measure_case(case, chosen, results, calls=2)
    errors = {row["method"]: row["error"] for row in results.rows}
    assert errors["fails"] == "RuntimeError: no such kernel"
    assert "is above 0.02" in errors["wrong"]
    assert errors["right"] is None
    assert json.loads((tmp_path / "rows.json").read_text()) == results.rows


def test_runs_with_one_lock_time_one_by_one(tmp_path):
    busy, overlaps = threading.Lock(), []

    def time_something():
        with timing.alone(tmp_path / "lock"):
            overlaps.append(not busy.acquire(blocking=False))
            time.sleep(0.05)
            busy.release()

    threads = [threading.Thread(target=time_something) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [False] * 4


def test_masks_dry_run_checks_each_mask_and_refuses_what_ignores_one(tmp_path, monkeypatch):
    # Of 256 tokens.
    monkeypatch.setattr(masks, "WINDOW", 64)
    masks.main(["--dry-run", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "masks_dry_run.json").read_text())
    assert [row["masks"] for row in rows] == list(masks.MASKS)
    assert all(row["error"] is None and 0 < row["max_error"] < 0.03 for row in rows)

    def deaf(query, key, value, *, is_causal, **ignored):
        return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)

    [method] = [method for method in methods.jax_methods() if method.name == "sagebwd mixed"]
    monkeypatch.setattr(masks, "jax_methods", lambda: [dataclasses.replace(method, attend=deaf)])
    masks.main(["--dry-run", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "masks_dry_run.json").read_text())
    wrong = [row["masks"] for row in rows if row["error"]]
    assert wrong == [name for name in masks.MASKS if name != "none"]


def test_masks_that_are_not_there_are_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        masks.main(["--dry-run", "--masks", "stripes"])
    assert "--masks stripes: none of none, window of 1024, " in capsys.readouterr().err


def test_speed_refuses_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(speed.jax, "devices", lambda: jax.local_devices(backend="cpu"))
    with pytest.raises(SystemExit, match="times an NVIDIA GPU; .*cpu"):
        speed.main(["--quick"])


def test_plots_of_a_sample_are_png_files(tmp_path):
    provenance = cases.make_provenance("NVIDIA H200", "abc")
    rows = [
        cases.make_record(case, method, pass_, provenance, seconds=1e-3, max_error=0.01)
        for case in cases.make_cases((1024, 8192), (64, 128))
        for method in ("sagebwd", "cuDNN", "something new")
        for pass_ in cases.PASSES
    ]
    rows.append(cases.make_record(cases.make_cases((1024,), (64,))[0], "late", "forward", provenance, error="no"))
    paths = plots.plot_speed(rows, tmp_path)
    assert [path.name for path in paths] == ["speed_h200_d64.png", "speed_h200_d128.png"]
    from matplotlib.image import imread

    assert all(imread(path).shape[2] == 4 and imread(path).std() > 0 for path in paths)


def test_accuracy_of_a_small_setting():
    setting = accuracy.Setting(length=256, depth=32, heads=2)
    cells = accuracy.measure(setting, presets=("default", "precise"), sigmas=(1, 5))
    assert [(c.preset, c.sigma) for c in cells[::4]] == [("default", 1), ("precise", 1), ("default", 5), ("precise", 5)]
    # sqrt(2 - 2 cos) is the error of vectors of one length.
    assert all(abs(c.l2 - np.sqrt(2 - 2 * c.cosine)) < 0.2 * c.l2 + 2e-3 for c in cells)
    at = {(c.preset, c.sigma, c.tensor): c.l2 for c in cells}
    assert at["precise", 5, "dQ"] < at["default", 5, "dQ"] / 2
    assert accuracy.table(cells, setting).row_count == 6


def made_up_cells(error_of):
    """Cells for every requirement, as accurate as `error_of(preset, sigma, tensor)`."""
    return [
        accuracy.Cell(preset=preset, sigma=sigma, tensor=tensor, l2=error_of(preset, sigma, tensor), cosine=1.0)
        for preset in accuracy.PRESETS
        for sigma in accuracy.SIGMAS
        for tensor in accuracy.TENSORS
    ]


def test_requirements_see_what_breaks_them():
    def good(preset, sigma, tensor):
        simulated = accuracy.ONE_SCALE_PER_TILE.get(sigma)
        if preset == "faithful" and simulated:
            return simulated[accuracy.TENSORS.index(tensor)]
        return 0.01

    def broken_by(change):
        cells = made_up_cells(lambda *key: change.get(key, good(*key)))
        return [text for text, problems in accuracy.requirements(cells) if problems]

    assert broken_by({}) == []
    # As accurate as the paper is not below the paper; NaN is not accurate.
    assert broken_by({("default", 5, "dQ"): 0.2014}) == ["default beats the paper at sigma 3, 5, 8 and 10"]
    assert broken_by({("default", 1, "O"): 0.0201}) == ["default is at most .020 at sigma 1"]
    assert broken_by({("precise", 10, "dV"): float("nan")}) == ["precise beats the paper at every sigma"]
    assert broken_by({("mixed", 1, "dK"): 0.0141}) == ["mixed has dQ and dK at most .014 at sigma 1"]
    assert broken_by({("faithful", 5, "O"): 0.05}) == ["faithful is as accurate as one scale per tile allows"]


# Two loops with a matrix instruction, the second longer; the first waits in a block at the end. Then one without.
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, R4 ;
        /*0020*/              @!P1 BRA 0xb0 ;
        /*0030*/                   FFMA.FTZ R2, R3, R4, R5 ;
        /*0040*/                   BRA.U UP0, 0x10 ;
        /*0050*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, R4 ;
        /*0060*/                   FADD R2, R3, R4 ;
        /*0070*/                   FMUL R2, R3, R4 ;
        /*0080*/                   FSEL R2, R3, R4, P2 ;
        /*0081*/                   FSEL R2, R3, R4, P2 ;
        /*0082*/                   FSEL R2, R3, R4, P2 ;
        /*0083*/                   FSEL R2, R3, R4, P2 ;
        /*0084*/                   FSEL R2, R3, R4, P2 ;
        /*0090*/               @P1 BRA 0x50 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   SYNCS R2 ;
        /*00c0*/               @P1 BRA 0xb0 ;
        /*00d0*/                   BRA 0x30 ;
        /*00e0*/                   BRA 0xe0 ;
"""


def test_the_hottest_loop_is_the_short_one_with_matrix_instructions():
    assert cuda_tools.hottest_loop_of(LISTING) == {"IMMA": 1, "FFMA": 1, "BRA": 4, "SYNCS": 1}
    assert cuda_tools.hottest_loop_of(LISTING.replace("IMMA", "IADD")) == {}


def test_the_hottest_loop_is_one_inside_of_a_loop_over_blocks():
    nested = LISTING.replace("                  EXIT", "                  BRA 0x0")
    assert cuda_tools.hottest_loop_of(nested) == cuda_tools.hottest_loop_of(LISTING)


def test_a_tool_does_not_see_what_other_threads_do_to_the_environment(monkeypatch):
    monkeypatch.setenv("ANOTHER_THREADS", "1")
    assert "ANOTHER_THREADS" not in cuda_tools._run(["env"])


def test_missing_tools_are_named_with_their_package(monkeypatch):
    monkeypatch.setattr(cuda_tools.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cuda_tools.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="nvidia-cuda-nvcc"):
        cuda_tools.find_tool("ptxas")


def test_blocks_that_a_multiprocessor_holds():
    h200 = gpu_targets.TARGETS["h200"]
    # 128 threads of 168 registers take 21504 of 65536; 90 KiB of shared memory fit twice in 228; 2048 threads.
    assert h200.blocks_per_core(168, 1000, 128) == 3
    assert h200.blocks_per_core(32, 90 * 1024, 128) == 2
    assert h200.blocks_per_core(32, 0, 1024) == 2


def test_tables_of_the_readme_are_those_of_the_results():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for table in tables.tables():
        assert len(table) > 3
        assert "\n".join(table) in readme


@pytest.mark.parametrize("kernel", ["grad_k", "grad_q_16"])
def test_tuning_times_the_rows_that_work_and_writes_them_as_the_table_does(kernel):
    [case] = cases.make_cases((256,), (64,), (True,), tokens=256, channels=64)
    rows = list(tune.candidates(kernel, 64, True, methods.PRESETS[tune.KERNELS[kernel][1]]))
    assert len(set(rows)) == len(rows) > 8
    with launch.interpreted():
        timed = tune.measure([rows[0], rows[-1]], case, calls=1)
    assert [row.milliseconds for row in timed] == sorted(row.milliseconds for row in timed)
    assert {dataclasses.replace(row, milliseconds=None) for row in timed} == {rows[0], rows[-1]}
    for row in timed:
        again = eval(tune.describe(row), {"_row": tiles._row})
        assert dataclasses.replace(again, milliseconds=None) in rows


def test_tuning_says_which_tile_is_wrong(monkeypatch):
    [case] = cases.make_cases((128,), (64,), (False,), tokens=128, channels=64)
    rows = list(tune.candidates("forward", 64, False, methods.PRESETS["sagebwd"]))[:2]
    trace = tune.trace_row
    times = {rows[0]: 1, rows[1]: 2}

    def scaled(row, case):
        prepare, run = trace(row, case)
        return prepare, lambda *operands: [x * times[row] for x in run(*operands)]

    monkeypatch.setattr(tune, "trace_row", scaled)
    notes = []
    with launch.interpreted():
        timed = tune.measure(rows, case, calls=1, note=notes.append)
    assert len(timed) == 1 and len(notes) == 1 and "differs from the first by 1" in notes[0]


def test_kernels_alone_are_timed_where_their_head_dim_is_not_padded():
    ours, *_, peer = methods.jax_methods("xla", dry=True)
    whole = ("forward", "forward+backward")
    assert ours.passes(64)[2:] == ("forward kernels", "backward kernels")
    assert ours.passes(16) == ours.passes(96) == peer.passes(64) == whole


def test_costs_count_what_is_kept_once(tmp_path):
    # JAX's own attention promotes.
    with jax.numpy_dtype_promotion("standard"):
        costs.main(["--dry-run", "--length", "256", "--output", str(tmp_path)])
    rows = {(r["method"], r["depth"]): r for r in json.loads((tmp_path / "costs_dry_run.json").read_text())}
    # int8 Q and K, 16-bit V and O; one float32 scale a query, one a row of O, its log-sum-exp, K's two scales a head.
    assert rows["sagebwd", 128]["kept_bytes_per_value"] == pytest.approx(6 + (3 + 2 / 256) * 4 / 128)
    # Q, K less its mean and Q, K for the scores besides.
    assert rows["sagebwd mixed", 128]["kept_bytes_per_value"] == pytest.approx(10 + (3 + 2 / 256) * 4 / 128)
    assert all(row["first_compilation_seconds"] > 0 for row in rows.values())


def test_kept_bytes_of_a_product_by_hand():
    x = jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)
    assert costs.kept_bytes(lambda a, b: a * b, [x, x]) == 2 * 2 * 15
    assert costs.kept_bytes(lambda a, b: a * a * b, [x, x]) >= 2 * 2 * 15


def test_what_follows_the_kernels_is_timed_with_them():
    inputs = make_inputs(128, 128, batch=1, heads=2, kv_heads=2, depth=64)
    [case] = cases.make_cases((128,), (64,), (False,), tokens=128, channels=128)
    spec = methods.call_spec(case, SageConfig())

    with launch.interpreted():
        residuals = kernels.forward(*inputs[:3], spec=spec, keep=True)[2]

        def doubled(residuals, dout):
            return tuple(2 * x for x in kernels.backward(residuals, dout, None, spec=spec))

        prepare, run = traces.split_at_kernels(doubled, (residuals, inputs[3]))
        chex.assert_trees_all_close(run(*prepare(residuals, inputs[3])), doubled(residuals, inputs[3]))

        def both(query, key, value, dout):
            return kernels.backward(kernels.forward(query, key, value, spec=spec, keep=True)[2], dout, None, spec=spec)

        with pytest.raises(ValueError, match="not a set of independent kernels: grad_v is not"):
            traces.split_at_kernels(both, inputs)

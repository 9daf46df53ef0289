"""Training on 8 host devices: the losses of one device on every mesh, and what travels between the devices.

The runs are made once, by this file as a program in a process of its own, for JAX must be told of 8 devices before it
starts.
"""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from train_micro import micro_config, write_text

from train.config import SettingError, parse_mesh
from train.mesh import make_mesh

ROOT = Path(__file__).parent.parent
STEPS = 6
MESHES = ("data=2,fsdp=4", "fsdp=8", "tensor=4")
# Eight heads of four groups, so that a tensor axis of 2 has two groups a device.
SIZES = dict(num_layers=1, num_heads=8, num_kv_heads=4, head_dim=10, steps=STEPS, warmup_steps=1, eval_every=STEPS)


def run_config(text, mesh, **overrides):
    """A step of 16 sequences; on each mesh in two micro batches."""
    sizes = parse_mesh(mesh)
    settings = SIZES | dict(
        data=text,
        held_out_fraction=0.2,
        mesh=mesh,
        tokens_per_step=16 * 24,
        micro_batch=8 // (sizes["data"] * sizes["fsdp"]),
        checkpoint_every=3,
        loss_chunk=12,
    )
    return micro_config(**(settings | overrides))


def make_runs(folder):
    """Every run of this file into ``folder``: losses, and the shapes of what the compiled steps gather."""
    from rich.console import Console

    from train import loop
    from train.metrics import read_metrics, series

    text = write_text(folder / "text")
    programs, interrupt_at = [], []
    make_train_step = loop.make_train_step

    def make_recorded_step(*arguments, **options):
        step, compiled, calls = make_train_step(*arguments, **options), [], []

        def recorded_step(*operands):
            if not compiled:
                compiled.append(step.lower(*operands).compile())
                programs.append(compiled[0].as_text())
            calls.append(None)
            if len(calls) in interrupt_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return compiled[0](*operands)

        return recorded_step

    loop.make_train_step = make_recorded_step

    def run(name, mesh, **overrides):
        config = run_config(text, mesh, **overrides)
        loop.train(config, run_dir=folder / name, console=Console(file=io.StringIO()), resume=True)
        records = read_metrics(folder / name)
        return {name: series(records, name)[1] for name in ("loss", "grad_norm", "held_out_loss")}

    found = {"one": run("one", "data=1"), **{mesh: run(mesh, mesh) for mesh in MESHES}}
    interrupt_at.append(3)
    run("moved", "data=8", ema_decay=0.5)
    interrupt_at.clear()
    found["moved"] = run("moved", "data=2,fsdp=2,tensor=2", ema_decay=0.5)
    found["sagebwd"] = run("sagebwd", "data=2,fsdp=2,tensor=2", attention="sagebwd", health_every=STEPS)
    rounded = dict(compute_dtype="bfloat16", logits_dtype="bfloat16")
    found["rounded"] = run("rounded", "data=2,fsdp=2,tensor=2", **rounded)
    health = read_metrics(folder / "sagebwd")[-1]
    found["health"] = {name: value for name, value in health.items() if isinstance(value, list)}
    # One array, or several that XLA gathers at once.
    gathers = [re.findall(r"= (\S+|\(.*?\)) all-gather(?:-start)?\(", program) for program in programs]
    shapes = [[shape for found in some for shape in re.findall(r"\w\[([\d,]*)\]", found)] for some in gathers]
    found["gathered"] = [[[int(n) for n in shape.split(",")] for shape in some] for some in shapes]
    found["others"] = [re.findall(r" (all-to-all|collective-permute)(?:-start)?\(", program) for program in programs]
    (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, __file__, str(folder)]
    environment = os.environ | {"XLA_FLAGS": flags.strip(), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", [*MESHES, "moved"])
def test_losses_are_those_of_one_device(found, name):
    """ "moved" was stopped on data=8 after step 3, and its checkpoint read on data=2,fsdp=2,tensor=2."""
    one, got = found["one"], found[name]
    assert len(one["loss"]) == STEPS and one["loss"][0] - one["loss"][-1] > 0.3
    np.testing.assert_allclose(got["loss"], one["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["grad_norm"], one["grad_norm"], rtol=1e-4)
    if name != "moved":  # whose held-out loss is its moving average's
        np.testing.assert_allclose(got["held_out_loss"], one["held_out_loss"], rtol=1e-5)


def test_sagebwd_attends_on_every_device_for_itself(found):
    np.testing.assert_allclose(found["sagebwd"]["loss"], found["one"]["loss"], rtol=1e-2)
    assert found["sagebwd"]["loss"] != found["one"]["loss"]
    assert 0 < found["health"]["error_out"][0] < 0.1


def test_in_16_bits_losses_are_near_those_of_one_device(found):
    np.testing.assert_allclose(found["rounded"]["loss"], found["one"]["loss"], rtol=1e-2)
    assert found["rounded"]["loss"] != found["one"]["loss"]


def test_only_parameters_are_gathered(found):
    """Of all compiled steps: whole matrices along fsdp and gains' gradients, and nothing of a sequence's length."""
    one, data2_fsdp4, fsdp8, tensor4, data8, moved, sagebwd, rounded = found["gathered"]
    on_fsdp = data2_fsdp4 + fsdp8 + moved + sagebwd + rounded
    sizes = {40, 40 * 56, 40 * 8 * 10, 40 * 4 * 10, 256 * 40}
    tensor_halves = {size // 2 for size in sizes}
    assert {math.prod(shape) for shape in on_fsdp} <= sizes | tensor_halves
    assert {math.prod(shape) for shape in data2_fsdp4} == sizes  # so that something was looked at
    assert one == tensor4 == data8 == []
    assert not any(found["others"])


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("data=2", {}, "mesh='data=2' needs 2 devices; JAX has 1"),
        ("fsdp=3", {}, "width=40 must be a multiple of mesh's fsdp=3"),
        ("tensor=2", {}, "num_kv_heads=3 must be a multiple of mesh's tensor=2"),
        ("tensor=3", {}, "ffn_width=56 must be a multiple of mesh's tensor=3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_name(text, overrides, message):
    import jax

    devices = jax.devices()[:1] * (1 if text == "data=2" else 8)
    with pytest.raises(SettingError, match=message):
        make_mesh(text, micro_config(**overrides).model, devices)


def test_axes_that_are_not_named_have_one_device():
    assert parse_mesh("fsdp=4") == dict(data=1, fsdp=4, tensor=1)
    assert parse_mesh("data=2, tensor=3") == dict(data=2, fsdp=1, tensor=3)
    assert parse_mesh("") == {}


if __name__ == "__main__":
    make_runs(Path(sys.argv[1]))

"""Training by two hosts, here two processes of two CPU devices: the losses of one process, in one folder.

This file is also their program: it needs the port of the first, its own number and a folder.
"""

import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from train_micro import micro_config, write_text

ROOT = Path(__file__).parent.parent


def run_config(folder, name, **overrides):
    settings = dict(data=str(folder / "text"), held_out_fraction=0.2, num_layers=1, num_heads=8, num_kv_heads=4)
    settings |= dict(steps=4, warmup_steps=1, eval_every=4, checkpoint_every=2, tokens_per_step=8 * 24, micro_batch=2)
    return micro_config(**(settings | dict(mesh="data=2,fsdp=2", runs_dir=str(folder / "runs"), name=name) | overrides))


def be_host(port, number, folder):
    import jax
    from rich.console import Console

    from train import loop

    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    assert (jax.process_count(), jax.device_count()) == (2, 4)
    free_run_dir = loop.free_run_dir

    def late(config):
        # Long enough for the other to have made the folder, were it not to wait.
        time.sleep(2 * number)
        return free_run_dir(config)

    loop.free_run_dir = late
    result = loop.train(run_config(folder, "two"), console=Console(file=io.StringIO()))
    print("folder", result.run_dir.name)


def test_two_hosts_train_in_one_folder_as_one_does(tmp_path):
    from rich.console import Console

    from train import loop
    from train.metrics import read_metrics, series

    write_text(tmp_path / "text")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    commands = [[sys.executable, __file__, str(port), str(number), str(tmp_path)] for number in range(2)]
    hosts = [
        subprocess.Popen(c, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    try:
        said = [host.communicate(timeout=240)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    for host, text in zip(hosts, said, strict=True):
        assert host.returncode == 0 and text.splitlines()[-1] == "folder two", text
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["two"]
    one = loop.train(run_config(tmp_path, "one", mesh="data=1", micro_batch=8), console=Console(file=io.StringIO()))
    for name in ("loss", "grad_norm", "held_out_loss"):
        got, expected = (series(read_metrics(run), name)[1] for run in (tmp_path / "runs" / "two", one.run_dir))
        np.testing.assert_allclose(got, expected, rtol=1e-4)
    # What both wrote is whole, and read by one.
    longer = run_config(tmp_path, "two", mesh="data=1", micro_batch=8, steps=5, warmup_steps=1)
    assert (
        loop.train(longer, run_dir=tmp_path / "runs" / "two", resume=True, console=Console(file=io.StringIO())).step
        == 5
    )


if __name__ == "__main__":
    be_host(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""Settings: JSON there and back, what is refused and with which words, and the command line."""

import ast
import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from train_micro import micro_config

from sagebwd_jax._attention import MAX_HEAD_DIM
from train import sample as sample_module
from train.cli import parse_command, parse_config
from train.config import PRESETS, SettingError, TrainConfig, _checks
from train.config import _settings as settings_module
from train.run_dir import CHANGEABLE, _flat, check_continues, read_config


def test_every_module_can_be_imported_first():
    code = """
import importlib, pkgutil, sys, train
names = [x.name for x in pkgutil.walk_packages(train.__path__, "train.") if not x.name.endswith("__main__")]
for name in names:
    for loaded in [x for x in sys.modules if x.partition(".")[0] == "train"]:
        del sys.modules[loaded]
    importlib.import_module(name)
print(len(names))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 20


@pytest.mark.parametrize("preset", PRESETS)
def test_json_round_trip(preset):
    config = dataclasses.replace(PRESETS[preset].with_attention("exact"), name="a name", seed=5)
    assert TrainConfig.from_json(config.to_json()) == config
    assert config.preset == preset


def test_json_holds_every_setting():
    values = json.loads(PRESETS["tiny"].to_json())
    assert values["model"]["head_dim"] == 32 and values["optimizer"]["beta2"] == 0.95
    assert values.keys() == {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [(None, "steps", "many"), (None, "steps", 1.5), ("model", "attention", "flash"), ("data", "tokenizer", 3)],
)
def test_json_with_a_value_of_another_type_is_refused(section, name, value):
    values = json.loads(PRESETS["tiny"].to_json())
    (values[section] if section else values)[name] = value
    with pytest.raises(SettingError, match=f"{name}={value!r} is not "):
        TrainConfig.from_json(json.dumps(values))


@pytest.mark.parametrize("section", [None, "model", "data", "optimizer"])
def test_json_with_an_unknown_or_missing_setting_is_refused(section):
    values = json.loads(PRESETS["tiny"].to_json())
    part = values[section] if section else values
    part["flash"] = 1
    with pytest.raises(SettingError, match=r"unknown settings \['flash'\]"):
        TrainConfig.from_json(json.dumps(values))
    del part["flash"]
    removed = sorted(part)[0]
    del part[removed]
    with pytest.raises(SettingError, match=rf"missing settings \['{removed}'\]"):
        TrainConfig.from_json(json.dumps(values))


def test_json_of_a_run_without_a_later_setting_is_what_the_run_did():
    values = json.loads(PRESETS["124m"].to_json())
    assert values["model"].pop("logits_dtype") == "bfloat16"
    assert TrainConfig.from_json(json.dumps(values)).model.logits_dtype == "float32"


def test_tokens_per_step_is_micro_batch_times_length_times_accumulation():
    assert micro_config().accumulation(1) == 1
    config = micro_config(tokens_per_step=4 * 24 * 6)
    assert (config.accumulation(1), config.accumulation(2), config.accumulation(6)) == (6, 3, 1)
    message = r"micro_batch=4 \* sequence_length=24 \* 4 data shards = 384, or the devices fewer: --mesh data=1"
    with pytest.raises(SettingError, match=message):
        config.accumulation(4)
    for config in PRESETS.values():
        pass_tokens = config.micro_batch * config.data.sequence_length
        assert config.accumulation(1) * pass_tokens == config.tokens_per_step


def test_the_papers_two_step_sizes_see_the_same_tokens():
    small, large = PRESETS["325m"], PRESETS["325m-2m"]
    assert (small.tokens_per_step, large.tokens_per_step) == (262_144, 2_097_152)
    assert small.steps * small.tokens_per_step == large.steps * large.tokens_per_step
    assert small.model == large.model and small.data == large.data


def test_head_dims_are_those_that_attention_takes():
    assert _checks.SAGEBWD_HEAD_DIM == MAX_HEAD_DIM


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            dict(tokens_per_step=100),
            r"tokens_per_step=100 must be a multiple of micro_batch=4 \* sequence_length=24 \* 1 data shards = 96",
        ),
        (dict(num_kv_heads=4), "num_heads=6 must be a multiple of num_kv_heads=4"),
        (dict(head_dim=7), "head_dim=7 must be even"),
        (dict(head_dim=258, attention="sagebwd"), "attention='sagebwd' takes head_dim up to 256, not 258"),
        (dict(vocab_size=255), "vocab_size=255 must be at least 256"),
        (dict(held_out_fraction=1.0), "held_out_fraction=1.0 must lie between 0 and 1"),
        (dict(warmup_steps=20), "warmup_steps=20 must be at least 0 and below steps=20"),
        (dict(warmup_steps=-1), "warmup_steps=-1 must be at least 0"),
        (dict(steps=0), "steps=0 must be at least 1"),
        (dict(num_layers=0), "num_layers=0 must be at least 1"),
        (dict(clip_norm=0.0), "clip_norm=0.0 must be above 0"),
        (dict(peak_learning_rate=float("nan")), "peak_learning_rate=nan must be above 0"),
        (dict(loss_chunk=7), "loss_chunk=7 must divide sequence_length=24 or be above it"),
        (dict(checkpoint_every=-1), "checkpoint_every=-1 must be at least 0"),
        (dict(mesh="data=2,model=3"), r"mesh='data=2,model=3': 'model=3' is not one of data=COUNT, fsdp=COUNT"),
        (dict(mesh="data=2,data=2"), "'data=2' is not one of"),
        (dict(mesh="fsdp=0"), "'fsdp=0' is not one of"),
        (dict(beta2=1.0), "beta2=1.0 must be at least 0 and below 1"),
        (dict(z_loss=-1.0), "z_loss=-1.0 must be at least 0"),
        (dict(decay_fraction=0.0), "decay_fraction=0.0 must be above 0 and at most 1"),
        (dict(peak_flops=0.0), "peak_flops=0.0 must be above 0"),
        (dict(workers=-1), "workers=-1 must be at least 0"),
        (dict(seed=-1), "seed=-1 must be at least 0"),
        (dict(seed=1 << 32), r"seed=4294967296 must be at least 0 and below 2\*\*32"),
        (dict(rope_theta=0.0), "rope_theta=0.0 must be above 0"),
        (dict(norm_eps=0.0), "norm_eps=0.0 must be above 0"),
        (dict(norm_eps=float("nan")), "norm_eps=nan must be above 0"),
        (dict(separator=-5), "separator=-5 must be at least 0 and below vocab_size=256"),
        (dict(separator=999), "separator=999 must be at least 0 and below vocab_size=256"),
        (dict(attention="cudnn"), "attention='cudnn' takes compute_dtype='bfloat16', not 'float32'"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(overrides, message):
    with pytest.raises(SettingError, match=message):
        micro_config(**overrides)


@pytest.mark.parametrize("module", [settings_module, sample_module])
def test_every_setting_has_its_unit(module):
    documented = 0
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for field, text in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).endswith("Config"):
                    assert isinstance(text, ast.Expr) and re.search(r"\(.+\)", ast.unparse(text)), ast.unparse(field)
                    documented += 1
    assert documented >= 7


class TestCommandLine:
    def parse(self, *arguments):
        return parse_config(arguments, program="train", description="")

    def test_nothing_said_is_tiny(self):
        assert self.parse() == PRESETS["tiny"]

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("form", [("--preset", "{}"), ("--preset={}",)])
    def test_preset(self, preset, form):
        assert self.parse(*(part.format(preset) for part in form)) == PRESETS[preset]

    def test_any_setting_by_its_own_name(self):
        got = self.parse(
            "--preset", "30m", "--attention", "exact", "--data", "x", "--beta1", ".8", "--qk-norm", "False"
        )
        base = PRESETS["30m"]
        assert got == dataclasses.replace(
            base,
            model=dataclasses.replace(base.model, attention="exact", qk_norm=False),
            data=dataclasses.replace(base.data, data="x"),
            optimizer=dataclasses.replace(base.optimizer, beta1=0.8),
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--flash", "1"), "Unrecognized options: --flash"),
            (("--preset", "huge"), "invalid choice 'huge'"),
            (("--attention", "flash"), "invalid choice 'flash'"),
            (("--steps", "many"), "many"),
            (("--tokens-per-step", "100"), "tokens_per_step=100 must be a multiple"),
        ],
    )
    def test_what_it_does_not_know_ends_the_program(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as stop:
            self.parse(*arguments)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err

    def command(self, *arguments):
        return parse_command(arguments, program="train", description="")

    def test_config_starts_from_a_file_and_takes_settings_on_top(self, tmp_path):
        saved = dataclasses.replace(PRESETS["30m"], seed=3)
        (tmp_path / "config.json").write_text(saved.to_json())
        got = self.command("--config", str(tmp_path / "config.json"), "--steps", "700")
        assert got.config == dataclasses.replace(saved, steps=700) and got.run_dir is None
        for path in (tmp_path / "nowhere.json", tmp_path):
            with pytest.raises(SettingError, match=f"config='{path}' is no file; accepted: the config.json of a run"):
                self.command("--config", str(path))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"not json", "no JSON: Expecting value"),
            (b"\xff\xfe", "codec can't decode"),
            (b"[1, 2]", r"\[1, 2\] is no object of settings for TrainConfig"),
            (b'{"flash": 1}', "unknown settings .'flash'. for TrainConfig"),
        ],
    )
    def test_a_config_that_holds_no_settings_is_refused_by_path(self, tmp_path, content, message):
        path = tmp_path / "config.json"
        path.write_bytes(content)
        for read in (lambda: self.command("--config", str(path)), lambda: read_config(tmp_path)):
            with pytest.raises(SettingError, match=f"{path}: .*{message}"):
                read()

    def test_a_resume_of_no_run_is_refused_unless_it_says_what_to_start(self, tmp_path):
        with pytest.raises(SettingError, match="resume='.*dmeo' is no run: .* --preset or --config to start one there"):
            self.command("--resume", str(tmp_path / "dmeo"), "--steps", "700")

    def test_resume_starts_from_the_preset_and_goes_on_from_the_run(self, tmp_path):
        arguments = "--preset", "30m", "--resume", str(tmp_path / "run"), "--seed", "4"
        first = self.command(*arguments)
        assert first.config == dataclasses.replace(PRESETS["30m"], seed=4) and first.run_dir == tmp_path / "run"
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.json").write_text(first.config.to_json())
        # The command of the first start starts it again; and so does the folder alone.
        assert self.command(*arguments) == self.command("--resume", str(tmp_path / "run")) == first

    def test_a_config_that_is_named_counts_for_a_run_that_is_there_too(self, tmp_path):
        (tmp_path / "config.json").write_text(PRESETS["30m"].to_json())
        changed = dataclasses.replace(PRESETS["30m"], log_every=3)
        (tmp_path / "changed.json").write_text(changed.to_json())
        got = self.command("--config", str(tmp_path / "changed.json"), "--resume", str(tmp_path))
        assert got.config == changed and got.run_dir == tmp_path

    def test_a_run_goes_on_only_with_what_keeps_its_model_and_batches(self):
        config = micro_config()
        check_continues(config, micro_config(mesh="data=1", steps=30, workers=2, attention="sagebwd"))
        for overrides, message in (
            (
                dict(width=48),
                "model.width=48: the run has 40 and cannot go on with another; what may change: checkpoint_every",
            ),
            (dict(seed=1), "seed=1: the run has 0"),
            (dict(sequence_length=12, loss_chunk=12), "data.sequence_length=12: the run has 24"),
            (dict(optimizer="muon"), "optimizer.optimizer='muon'"),
        ):
            with pytest.raises(SettingError, match=message):
                check_continues(config, micro_config(**overrides))
        assert CHANGEABLE <= dict(_flat(dataclasses.asdict(config))).keys()

"""Settings: JSON there and back, what is refused and with which words, and the command line."""

import dataclasses
import json

import pytest
from train_micro import micro_config

from train.cli import parse_config
from train.config import PRESETS, SettingError, TrainConfig


@pytest.mark.parametrize("preset", PRESETS)
def test_json_round_trip(preset):
    config = dataclasses.replace(PRESETS[preset].with_attention("exact"), name="a name", seed=5)
    assert TrainConfig.from_json(config.to_json()) == config
    assert config.preset == preset


def test_json_holds_every_setting():
    values = json.loads(PRESETS["tiny"].to_json())
    assert values["model"]["head_dim"] == 32 and values["optimizer"]["beta2"] == 0.95
    assert values.keys() == {field.name for field in dataclasses.fields(TrainConfig)}


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


def test_tokens_per_step_is_micro_batch_times_length_times_accumulation():
    assert micro_config().accumulation == 1
    assert micro_config(tokens_per_step=4 * 24 * 3).accumulation == 3
    for config in PRESETS.values():
        assert config.accumulation * config.micro_batch * config.data.sequence_length == config.tokens_per_step


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            dict(tokens_per_step=100),
            r"tokens_per_step=100 must be a multiple of micro_batch=4 \* sequence_length=24 = 96",
        ),
        (dict(num_kv_heads=4), "num_heads=6 must be a multiple of num_kv_heads=4"),
        (dict(head_dim=7), "head_dim=7 must be even"),
        (dict(vocab_size=255), "vocab_size=255 must be at least 256"),
        (dict(held_out_fraction=1.0), "held_out_fraction=1.0 must lie between 0 and 1"),
        (dict(warmup_steps=20), "warmup_steps=20 must be at least 0 and below steps=20"),
        (dict(warmup_steps=-1), "warmup_steps=-1 must be at least 0"),
        (dict(steps=0), "steps=0 must be at least 1"),
        (dict(num_layers=0), "num_layers=0 must be at least 1"),
        (dict(clip_norm=0.0), "clip_norm=0.0 must be above 0"),
        (dict(peak_learning_rate=float("nan")), "peak_learning_rate=nan must be above 0"),
        (dict(attention="cudnn"), "attention='cudnn' takes compute_dtype='bfloat16', not 'float32'"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(overrides, message):
    with pytest.raises(SettingError, match=message):
        micro_config(**overrides)


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

"""SageConfig: its presets, what it refuses, and that it can be a static argument."""

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import call_spec, forward_and_backward, make_inputs, oracle, relative_error

from sagebwd_jax import SageConfig
from sagebwd_jax._config import LENGTH_MULTIPLE, MATRIX_PRODUCTS

PRESETS = {
    "default": SageConfig(),
    "faithful": SageConfig.faithful(),
    "mixed": SageConfig.mixed(),
    "precise": SageConfig.precise(),
}


def test_precision_of_the_presets():
    expected = dict(default=set(), faithful=set(), mixed={"dv", "dq", "dk"}, precise={"qk"})
    assert {name: set(config.sixteen_bit) for name, config in PRESETS.items()} == expected


def test_faithful_has_the_scales_of_the_paper():
    config = SageConfig.faithful()
    assert config.smooth_k and not config.smooth_q
    assert (config.query_scale, config.key_scale, config.value_scale) == ("block",) * 3
    assert config.grad_scale == "tile"
    spans = config.pv_span, config.dv_span, config.dk_span, config.dq_span
    assert {config.block_q, config.block_k, *spans} == {64}


def test_default_smooths_keys_and_scales_rows():
    config = SageConfig()
    assert config.smooth_k and not config.smooth_q
    assert config.query_scale == "token" and config.grad_scale == "row"


@pytest.mark.parametrize("depth", [1, 64, 65, 256])
@pytest.mark.parametrize("name", PRESETS)
def test_spans_and_blocks_divide_the_padded_length(name, depth):
    config = PRESETS[name].at_depth(depth)
    for field in dataclasses.fields(SageConfig):
        if field.name.startswith("block_") or field.name.endswith("_span"):
            assert LENGTH_MULTIPLE % getattr(config, field.name) == 0


@pytest.mark.parametrize(("depth", "span"), [(1, 64), (64, 64), (65, 128), (256, 128)])
def test_the_span_that_is_left_open_goes_by_the_head_dim(depth, span):
    assert SageConfig().at_depth(depth) == SageConfig(dv_span=span)
    assert SageConfig(dv_span=32).at_depth(depth).dv_span == 32
    tiles = SageConfig(grad_scale="tile", block_q=64, block_k=64, pv_span=64)
    assert tiles.at_depth(depth).dv_span == tiles.block_q


def test_a_call_computes_by_the_span_of_its_head_dim():
    inputs = make_inputs(256, 200, batch=1, heads=2, kv_heads=1)
    configs = SageConfig(), SageConfig(dv_span=64), SageConfig(dv_span=128)
    for run in (oracle, lambda *inputs, config: forward_and_backward("xla", config=config)(*inputs)):
        left_open, chosen, other = (run(*inputs, config=config).dv for config in configs)
        assert relative_error(left_open, chosen) == 0
        assert relative_error(left_open, other) > 1e-3


REFUSED = {
    "smooth_k": ("yes", "True, False"),
    "query_scale": ("channel", "'token', 'block'"),
    "key_scale": ("tile", "'token', 'block'"),
    "value_scale": ("token", "'channel', 'block'"),
    "grad_scale": ("block", "'row', 'tile'"),
    "block_q": (48, "32, 64, 128"),
    "block_k": (256, "32, 64, 128"),
    "pv_span": (16, "32, 64, 128"),
    "dv_span": (0, "32, 64, 128"),
    "dk_span": (-64, "32, 64, 128"),
    "dq_span": (None, "32, 64, 128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_value_and_what_is_accepted(name):
    value, accepted = REFUSED[name]
    with pytest.raises(ValueError) as refused:
        SageConfig(**{name: value})
    message = str(refused.value)
    assert f"{name}={value!r}" in message and accepted in message


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SageConfig)])
def test_every_field_is_checked(name):
    # A field that is added later must not be open to anything.
    with pytest.raises((ValueError, NotImplementedError), match=name):
        SageConfig(**{name: ["nonsense"] if name == "sixteen_bit" else "nonsense"})


def test_refuses_unknown_products():
    with pytest.raises(ValueError, match="sixteen_bit.*'dp', 'vk'.*qk, pv, dv, dq, dk"):
        SageConfig(sixteen_bit={"vk", "qk", "dp"})


def test_refuses_a_bare_string_of_products():
    with pytest.raises(ValueError, match="sixteen_bit"):
        SageConfig(sixteen_bit="qk")


def test_refuses_smoothing_of_q():
    with pytest.raises(NotImplementedError, match="smooth_q=True.*smooth_q=False"):
        SageConfig(smooth_q=True)


@pytest.mark.parametrize("spans", [dict(block_k=64), dict(block_k=32, pv_span=32, dq_span=64)])
def test_refuses_a_key_scale_that_varies_along_a_sum(spans):
    with pytest.raises(ValueError, match="block_k=.*multiple of.*pv_span=.*dq_span="):
        SageConfig(**spans)
    SageConfig(**spans, key_scale="token")


@pytest.mark.parametrize("name", ["dv_span", "dk_span", "dq_span"])
def test_refuses_tiles_that_are_not_blocks(name):
    with pytest.raises(ValueError, match=f"grad_scale='tile' needs {name}=64"):
        dataclasses.replace(SageConfig.faithful(), **{name: 32})


@pytest.mark.parametrize("name", ["block_q", "block_k"])
def test_refuses_tiles_that_no_kernel_owns(name):
    with pytest.raises(ValueError, match=f"grad_scale='tile' needs block_q and block_k of at most 64; .*{name}=128"):
        dataclasses.replace(SageConfig.faithful(), **{name: 128})


def test_unknown_fields_and_positions_are_type_errors():
    with pytest.raises(TypeError, match="smooth_v"):
        SageConfig(smooth_v=True)
    with pytest.raises(TypeError, match="positional"):
        SageConfig(True)


def test_is_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SageConfig().smooth_k = False
    assert len({SageConfig(), SageConfig(), *PRESETS.values()}) == len(PRESETS)
    assert SageConfig(sixteen_bit=["qk"]) == SageConfig(sixteen_bit={"qk"}) == SageConfig(sixteen_bit=("qk", "qk"))
    assert hash(SageConfig(sixteen_bit=["qk", "pv"])) == hash(SageConfig(sixteen_bit=["pv", "qk"]))


@pytest.mark.parametrize("name", PRESETS)
def test_survives_pickling_and_replacement(name):
    config = PRESETS[name]
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config) == config


@pytest.mark.parametrize("products", [("qk",), ("dq", "dk")])
def test_call_spec_knows_what_runs_in_int8(products):
    config = SageConfig(sixteen_bit=products)
    spec = call_spec(3, 4, config=config)
    for product in MATRIX_PRODUCTS:
        assert spec.keeps_16_bits(product) == (product in products)
        assert spec.uses_int8(product) == (product not in products)
    assert spec.keeps_16_bits("pv", *products) and spec.uses_int8("pv", *products)
    assert not spec.uses_int8(*products) and not spec.keeps_16_bits("pv", "dv")


# Each choice must change a result, or it is an option without effect.
CHANGES = {
    "smooth_k": (dict(smooth_k=False), ("out", "dq")),
    "query_scale": (dict(query_scale="block"), ("out", "dk")),
    "key_scale": (dict(key_scale="token"), ("out", "dq")),
    "value_scale": (dict(value_scale="block"), ("out",)),
    "grad_scale": (dict(grad_scale="tile"), ("dq", "dk", "dv")),
    "pv_span": (dict(pv_span=64), ("out",)),
    "dv_span": (dict(dv_span=128), ("dv",)),
    "dk_span": (dict(dk_span=128), ("dk",)),
    "dq_span": (dict(dq_span=128), ("dq",)),
} | {f"16-bit-{product}": (dict(sixteen_bit={product}), ()) for product in MATRIX_PRODUCTS}
# What it is changed from, where that is not the default: a scale a tile is of 64 x 64 scores at most.
BASES = {"grad_scale": dict(block_q=64, block_k=64, pv_span=64, dv_span=64)}
AFFECTED = {"qk": "out", "pv": "out"} | {product: product for product in ("dv", "dq", "dk")}


@pytest.mark.parametrize("name", CHANGES)
def test_every_choice_changes_what_it_names(name):
    base, (options, fields) = BASES.get(name, {}), CHANGES[name]
    inputs = make_inputs(150, 257, batch=1, heads=2, kv_heads=1)
    inputs[1] = inputs[1].at[..., 1].add(3)
    plain, changed = (oracle(*inputs, config=SageConfig(**base, **x)) for x in ({}, options))
    fields = fields or (AFFECTED[name.removeprefix("16-bit-")],)
    for field in fields:
        assert relative_error(getattr(changed, field), getattr(plain, field)) > 2e-3, field


@pytest.mark.parametrize("first", ["sagebwd_jax", "pallas_kernels.attention", "sagebwd_jax._xla"])
def test_either_package_can_be_imported_first(first):
    # Each reads a module of the other.
    command = [sys.executable, "-c", f"import {first}, sagebwd_jax"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}, check=True)

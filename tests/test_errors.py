"""What is refused, when it is traced, and that the message names the argument, what it got and what is accepted."""

import contextlib
import functools
import inspect
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import count_kernels, make_inputs
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import launch
from sagebwd_jax import SageConfig, attention

B, T, S, N, K, H = 2, 5, 7, 6, 3, 16


def make():
    query, key, value, _ = make_inputs(T, S, batch=B, heads=N, kv_heads=K, depth=H)
    return dict(query=query, key=key, value=value)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def all_of(dtype):
    return {name: x.astype(dtype) for name, x in make().items()}


# what is wrong: (arguments, exception, regular expressions that the message must hold)
REFUSED = {
    "one dtype differs": (
        dict(value=zeros(B, S, K, H, dtype=jnp.bfloat16)),
        ValueError,
        ["query float32", "key float32", "value bfloat16", "one dtype"],
    ),
    "integers": (all_of(jnp.int8), TypeError, ["query", "int8", "bfloat16, float16, float32"]),
    "float8": (all_of(jnp.float8_e4m3fn), TypeError, ["query", "float8_e4m3fn", "bfloat16, float16, float32"]),
    "booleans in value": (dict(value=zeros(B, S, K, H, dtype=bool)), TypeError, ["value", "bool", "float32"]),
    "complex keys": (dict(key=zeros(B, S, K, H, dtype=jnp.complex64)), TypeError, ["key", "complex64", "float32"]),
    "rank 2": (dict(query=zeros(T, H)), ValueError, ["query", r"\(5, 16\)", r"\[B, T, N, H\]"]),
    "rank 5": (dict(query=zeros(1, B, T, N, H)), ValueError, ["query", r"\(1, 2, 5, 6, 16\)", r"\[T, N, H\]"]),
    "key of another rank": (dict(key=zeros(S, K, H)), ValueError, ["key", r"\(7, 3, 16\)", r"\[B, S, K, H\]"]),
    "value shorter than key": (
        dict(value=zeros(B, S - 1, K, H)),
        ValueError,
        ["key", "value", r"\(2, 7, 3, 16\)", r"\(2, 6, 3, 16\)"],
    ),
    "value of another head dim": (dict(value=zeros(B, S, K, H // 2)), ValueError, ["value", r"\(2, 7, 3, 8\)"]),
    "batch sizes": (
        dict(key=zeros(B + 1, S, K, H), value=zeros(B + 1, S, K, H)),
        ValueError,
        ["batch", r"\(2, 5, 6, 16\)", r"\(3, 7, 3, 16\)"],
    ),
    "batch of one is not broadcast": (dict(query=zeros(1, T, N, H)), ValueError, ["batch", r"\(1, 5, 6, 16\)"]),
    "head dims": (
        dict(key=zeros(B, S, K, 8), value=zeros(B, S, K, 8)),
        ValueError,
        ["head dim", r"\(2, 5, 6, 16\)", r"\(2, 7, 3, 8\)"],
    ),
    "heads": (
        dict(key=zeros(B, S, 4, H), value=zeros(B, S, 4, H)),
        ValueError,
        ["heads", "multiple", r"\b6\b", r"\b4\b"],
    ),
    "no key heads": (
        dict(key=zeros(B, S, 0, H), value=zeros(B, S, 0, H)),
        ValueError,
        ["heads", "multiple", r"\b6\b", r"\b0\b"],
    ),
    "head dim too large": (
        dict(query=zeros(B, T, N, 257), key=zeros(B, S, K, 257), value=zeros(B, S, K, 257)),
        NotImplementedError,
        ["head dim", "257", "1 to 256"],
    ),
    "no head dim": (
        dict(query=zeros(B, T, N, 0), key=zeros(B, S, K, 0), value=zeros(B, S, K, 0)),
        NotImplementedError,
        ["head dim", "0", "1 to 256"],
    ),
    "implementation": (
        dict(implementation="cudnn"),
        ValueError,
        ["implementation", "'cudnn'", "None, 'triton', 'xla'"],
    ),
    "config": (dict(config="mixed"), TypeError, ["config", "'mixed'", "str", "SageConfig"]),
    "complex scale": (dict(scale=1j), TypeError, ["scale", "complex", "a real number"]),
    "complex array as scale": (dict(scale=zeros(dtype=jnp.complex64)), TypeError, ["scale", "complex64", "real"]),
    "word as scale": (dict(scale="a"), TypeError, ["scale='a'", "str", "a real number"]),
    "boolean scale": (dict(scale=True), TypeError, ["scale=True", "bool", "a real number"]),
    "boolean array as scale": (dict(scale=zeros(dtype=bool)), TypeError, ["scale", "bool", "a real number"]),
    "scale of each channel": (dict(scale=zeros(H)), ValueError, ["scale", r"\(16,\)", "one element"]),
    "scale of rank 5": (dict(scale=zeros(3, B, T, N, H)), ValueError, ["scale", r"\(3, 2, 5, 6, 16\)", "one element"]),
    "no scale at all": (dict(scale=zeros(0)), ValueError, ["scale", r"\(0,\)", "one element"]),
    "numbers as scale": (dict(scale=[0.5, 0.5]), ValueError, ["scale", r"\(2,\)", "one element"]),
    "word as is_causal": (dict(is_causal="no"), TypeError, ["is_causal='no'", "str", "a bool"]),
    "array as is_causal": (dict(is_causal=zeros(T, dtype=bool)), TypeError, ["is_causal", "Array", "a bool"]),
    "number as is_causal": (dict(is_causal=1), TypeError, ["is_causal=1", "int", "a bool"]),
    "None as is_causal": (dict(is_causal=None), TypeError, ["is_causal=None", "NoneType", "a bool"]),
    "word as return_residual": (dict(return_residual="no"), TypeError, ["return_residual='no'", "str", "a bool"]),
    "mask of integers": (dict(mask=zeros(B, 1, T, S, dtype=jnp.int32)), TypeError, ["mask", "int32", "bool"]),
    "mask of floats": (
        dict(mask=zeros(T, S)),
        TypeError,
        ["mask", "float32", "bool", r"sagebwd_jax\.flax\.attention_fn takes"],
    ),
    "mask of other keys": (
        dict(mask=zeros(B, 1, T, S + 1, dtype=bool)),
        ValueError,
        ["mask", r"\(2, 1, 5, 8\)", r"\[B, N, T, S\] = \(2, 6, 5, 7\)"],
    ),
    "mask of key heads": (dict(mask=zeros(B, K, T, S, dtype=bool)), ValueError, ["mask", r"\(2, 3, 5, 7\)"]),
    "mask [B, S]": (dict(mask=zeros(B, S, dtype=bool)), ValueError, ["mask", r"\(2, 7\)", r"\(2, 6, 5, 7\)"]),
    "mask of rank 5": (dict(mask=zeros(1, B, N, T, S, dtype=bool)), ValueError, ["mask", r"\(1, 2, 6, 5, 7\)"]),
    "boolean bias": (
        dict(bias=zeros(B, N, T, S, dtype=bool)),
        TypeError,
        ["bias", "bool", "bfloat16, float16, float32", "passed as mask"],
    ),
    "bias of integers": (dict(bias=zeros(T, S, dtype=jnp.int8)), TypeError, ["bias", "int8", "bfloat16, float16"]),
    "bias of other queries": (
        dict(bias=zeros(N, S, T)),
        ValueError,
        ["bias", r"\(6, 7, 5\)", r"\[B, N, T, S\] = \(2, 6, 5, 7\)"],
    ),
    "lengths of floats": (
        dict(query_seq_lengths=zeros(B)),
        TypeError,
        ["query_seq_lengths", "float32", "accepted are integers"],
    ),
    "lengths of each token": (
        dict(key_value_seq_lengths=zeros(B, S, dtype=jnp.int32)),
        ValueError,
        ["key_value_seq_lengths", r"\(2, 7\)", r"\[B\] = \(2,\)"],
    ),
    "one length for a batch": (dict(query_seq_lengths=3), ValueError, ["query_seq_lengths", r"\(\)", r"\(2,\)"]),
    "window of three": (dict(local_window_size=(1, 2, 3)), ValueError, ["local_window_size", r"\(1, 2, 3\)", "pair"]),
    "empty window": (dict(local_window_size=()), ValueError, ["local_window_size", r"\(\)", "pair"]),
    "negative window": (dict(local_window_size=(3, -1)), ValueError, ["local_window_size", r"\(3, -1\)", "negative"]),
    "window of floats": (dict(local_window_size=1.5), TypeError, ["local_window_size", "1.5", "float", "int"]),
    "window that is False": (dict(local_window_size=False), TypeError, ["local_window_size", "False", "bool", "int"]),
    "segments of queries alone": (
        dict(query_segment_ids=zeros(B, T, dtype=jnp.int32)),
        ValueError,
        ["key_value_segment_ids is None", "together", "T=5", "S=7"],
    ),
    "segments of keys alone": (
        dict(key_value_segment_ids=zeros(B, S, dtype=jnp.int32)),
        ValueError,
        ["query_segment_ids is None", "together"],
    ),
    "segments of other keys": (
        dict(query_segment_ids=zeros(B, T, dtype=jnp.int32), key_value_segment_ids=zeros(B, T, dtype=jnp.int32)),
        ValueError,
        ["key_value_segment_ids", r"\(2, 5\)", r"\[B, S\] = \(2, 7\)"],
    ),
    "segments of floats": (
        dict(query_segment_ids=zeros(B, T), key_value_segment_ids=zeros(B, S)),
        TypeError,
        ["query_segment_ids", "float32", "integers"],
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_refused(wrong, jit):
    arguments, exception, patterns = REFUSED[wrong]
    arguments = make() | dict(implementation="xla") | arguments
    arrays = {name: arguments.pop(name) for name in ("query", "key", "value")}
    with pytest.raises(exception) as refused:
        if jit:
            jax.eval_shape(lambda x: attention(**x, **arguments), arrays)
        else:
            attention(**arrays, **arguments)
    assert refused.type is exception
    for pattern in patterns:
        refused.match(pattern)


@pytest.mark.parametrize("name", ["attn_mask", "dropout_rate", "logits_soft_cap", "causal", "foo"])
def test_unknown_names_are_type_errors(name):
    with pytest.raises(TypeError, match=name):
        attention(**make(), **{name: 1})


def test_options_are_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        attention(*make().values(), None, None, 0.5)


def test_parameters_are_those_of_jax():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(attention).parameters
    assert [name for name in ours if name in theirs] == list(theirs)
    assert set(ours) - set(theirs) <= {"config", "query_segment_ids", "key_value_segment_ids"}
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


def test_scale_is_checked_where_nothing_is_attended_to():
    with pytest.raises(TypeError, match="scale='a'"):
        attention(*(x[:, :0] for x in make().values()), scale="a", implementation="xla")


def test_traced_flags_are_refused():
    x = make()
    with pytest.raises(TypeError, match="is_causal.*a bool, known when the call is traced"):
        jax.jit(lambda is_causal: attention(**x, is_causal=is_causal, implementation="xla"))(True)


def test_numpy_flags_are_bools():
    x = make()
    traced = [
        jax.make_jaxpr(lambda x, flag=flag: attention(**x, is_causal=flag, return_residual=flag))(x)
        for flag in (True, np.True_)
    ]
    assert str(traced[0]) == str(traced[1])


def test_float64_is_refused():
    with jax.enable_x64(True):
        wide = {name: np.zeros(x.shape, np.float64) for name, x in make().items()}
        with pytest.raises(TypeError, match="query has dtype float64: accepted are bfloat16, float16, float32"):
            attention(**wide, implementation="xla")


class TestTarget:
    """An explicit choice never falls back."""

    def test_triton_on_a_cpu(self):
        if jax.default_backend() != "cpu":
            pytest.skip("there is a GPU")
        with pytest.raises(NotImplementedError, match="implementation='triton'.*8.0.*cpu.*'xla'"):
            attention(**make(), implementation="triton")

    @pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
    def test_triton_on_an_old_gpu(self, monkeypatch, capability):
        monkeypatch.setattr(launch, "target_capability", lambda: capability)
        with pytest.raises(NotImplementedError, match="implementation='triton'.*8.0.*7.[05].*'xla'"):
            attention(**make(), implementation="triton")

    @pytest.mark.parametrize(("capability", "kernels"), [((7, 5), 0), ((8, 0), 1), ((12, 0), 1)])
    def test_none_on_an_old_gpu_is_xla(self, monkeypatch, capability, kernels):
        monkeypatch.setattr(launch, "target_capability", lambda: capability)
        assert count_kernels(lambda x: attention(**x), make(), name="sagebwd_forward") == kernels

    @pytest.mark.parametrize(
        ("kind", "capability"),
        [("NVIDIA GeForce RTX 3090", (8, 6)), ("NVIDIA H20", (9, 0)), ("NVIDIA B300", (10, 3)), ("Tesla V100", (7, 0))],
    )
    def test_a_gpu_is_asked_itself_inside_of_a_mesh_too(self, monkeypatch, kind, capability):
        # A mesh describes its devices by their names, which no table could all know.
        device = types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability="{}.{}".format(*capability))
        described = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, 1, "gpu"))
        monkeypatch.setattr(jax, "devices", lambda: [device])
        assert launch.target_capability() == capability
        with jax.sharding.use_abstract_mesh(described):
            assert launch.target_capability() == capability

    def test_a_gpu_that_is_not_there_goes_by_its_name(self):
        for kind, capability in (("NVIDIA L40S", (8, 9)), ("NVIDIA GH200 480GB", (9, 0)), ("a new one", None)):
            mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, 1, "gpu"))
            with jax.sharding.use_abstract_mesh(mesh):
                assert launch.target_capability() == capability

    def test_interpreted_kernels_run_anywhere(self):
        with launch.interpreted():
            assert launch.is_interpreted()
            jax.eval_shape(lambda: attention(**make(), implementation="triton"))
        assert not launch.is_interpreted()

    @pytest.mark.parametrize("nested", [False, True])
    def test_and_under_vmap(self, nested):
        shape = (2, 2, 2**18, 17, 128) if nested else (4, 2**18, 17, 128)
        call = functools.partial(attention, implementation="triton")
        for _ in range(len(shape) - 3):
            call = jax.vmap(call)
        with launch.interpreted(), pytest.raises(NotImplementedError, match=r"INT8 tensor.* 4 times under vmap.*2\^31"):
            jax.eval_shape(lambda x: call(x, x, x), jax.ShapeDtypeStruct(shape, jnp.bfloat16))

    @pytest.mark.parametrize(("length", "refused"), [(2**20, True), (2**19, False), (2**21, False)])
    def test_tensors_whose_offsets_pallas_gets_wrong(self, length, refused):
        shape = jax.ShapeDtypeStruct((1, length, 17, 128), jnp.bfloat16)
        refusal = pytest.raises(NotImplementedError, match=rf"\(1, 17, {length}, 128\).*2\^31.*heads")
        with launch.interpreted(), refusal if refused else contextlib.nullcontext():
            jax.eval_shape(lambda x: attention(x, x, x, implementation="triton"), shape)

    @pytest.mark.parametrize("bad", [dict(block_q=96), dict(block_k=0), dict(num_warps=3), dict(num_stages=0)])
    def test_tiles_are_powers_of_two(self, bad):
        [[name, value]] = bad.items()
        with pytest.raises(ValueError, match=f"{name}={value}.*power of two"):
            launch.Tile(**(dict(block_q=64, block_k=64, num_warps=4, num_stages=3) | bad))


IMPORT = """
import sys
import types
import sagebwd_jax
loaded = [name for name in ("flax", "optax", "matplotlib", "train") if name in sys.modules]
assert not loaded, loaded
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert {x for x in vars(sagebwd_jax) if not x.startswith("_")} == PUBLIC, vars(sagebwd_jax)
"""


def test_import_is_light_and_touches_no_device():
    code = f"PUBLIC = {{'RESIDUAL_NAMES', 'SageConfig', 'attention', 'ring_attention'}}{IMPORT}"
    environment = dict(PYTHONPATH=str(Path(__file__).parents[1]), JAX_PLATFORMS="cpu")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_accepts_what_jax_accepts_as_arrays():
    arrays = {name: np.asarray(x) for name, x in make().items()}
    from_numpy = attention(**arrays, implementation="xla")
    assert from_numpy.shape == arrays["query"].shape
    assert attention(**arrays, implementation="xla", config=SageConfig()).dtype == jnp.float32

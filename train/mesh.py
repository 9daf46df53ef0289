"""The device mesh: three axes, and where parameters, activations and batches lie on them.

data: copies of the model, each with its own sequences. fsdp: the same, but the copies share the memory of parameters
and optimizer. tensor: heads and FFN channels of one layer, and rows of the embedding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.config import AXES, ModelConfig, SettingError, parse_mesh

# The axes that the sequences of a batch are spread over.
BATCH_AXES = ("data", "fsdp")
# The axes of each kind of parameter, by the end of its path; norms are whole on every device.
_PARAMETER_SPECS = {
    "embedding": P("tensor", "fsdp"),
    "query.kernel": P("fsdp", "tensor", None),
    "key.kernel": P("fsdp", "tensor", None),
    "value.kernel": P("fsdp", "tensor", None),
    "out.kernel": P("tensor", None, "fsdp"),
    "gate.kernel": P("fsdp", "tensor"),
    "up.kernel": P("fsdp", "tensor"),
    "down.kernel": P("tensor", "fsdp"),
}


def make_mesh(text: str, model: ModelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run, over as many of the devices as it needs.

    Raises:
      SettingError: more devices than there are, or a size that does not divide what the model spreads over it.
    """
    devices = jax.devices() if devices is None else devices
    sizes = parse_mesh(text) or {"data": len(devices), "fsdp": 1, "tensor": 1}
    count = sizes["data"] * sizes["fsdp"] * sizes["tensor"]
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        raise SettingError(f"mesh={text!r} needs {count} devices; JAX has {len(devices)}")
    spread = {"fsdp": ("width",), "tensor": ("num_heads", "num_kv_heads", "ffn_width", "vocab_size")}
    for axis, names in spread.items():
        for name in names:
            if getattr(model, name) % sizes[axis]:
                raise SettingError(f"{name}={getattr(model, name)} must be a multiple of mesh's {axis}={sizes[axis]}")
    return jax.make_mesh(tuple(sizes.values()), AXES, (AxisType.Auto,) * len(AXES), devices=devices[:count])


def batch_shards(mesh: Mesh) -> int:
    """Parts that the sequences of a batch are cut into (count)."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, P())


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Where each array of a training state lies: moments as their parameters, counters everywhere."""
    return _map_specs(lambda spec, leaf: NamedSharding(mesh, spec), state)


def constrain_state(state: Any) -> Any:
    """Says the same inside of a jitted function, on the mesh of the context; without one, nothing."""
    return _map_specs(lambda spec, leaf: constrain(leaf, *spec), state)


def constrain(x: Any, *axes: Any) -> Any:
    """Says how an activation lies on the mesh of the context; without one, nothing."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, P(*axes))


def gather_parameters(module: nnx.Module, dtype: Any) -> nnx.Module:
    """The module with its matrices in ``dtype`` and whole along fsdp, as its products read them.

    Said for one layer at a time, inside of what is recomputed, so that only the layer at work is whole; and cast
    before, so that half the bytes travel. Without a mesh, the module itself.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return module
    graphdef, params = nnx.split(module)

    def gather(spec: P, leaf: Any) -> Any:
        if leaf.ndim < 2:
            return leaf
        return constrain(leaf.astype(dtype), *(None if axis == "fsdp" else axis for axis in spec))

    return nnx.merge(graphdef, _map_specs(gather, params))


def parameter_name(path: Any) -> str:
    """A parameter's name, as in ``blocks.0.ffn.up.kernel``, from its array's path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def _map_specs(function: Callable[[P, Any], Any], tree: Any) -> Any:
    """function(axes, array) of every array in a tree of parameters, of moments of them, or of anything around them."""

    def apply(path: Any, leaf: Any) -> Any:
        name = "." + parameter_name(path)
        specs = (spec for end, spec in _PARAMETER_SPECS.items() if name.endswith(f".{end}") and len(spec) == leaf.ndim)
        return function(next(specs, P()), leaf)

    return jax.tree_util.tree_map_with_path(apply, tree)

"""How attention partitions over a mesh: by batch and by key head, whose results depend on nothing else.

XLA's partitioner cannot look into a kernel and would gather all that the kernel reads. There are three kinds of mesh
axes: those that XLA partitions over (`Auto`: `custom_partitioning` has the rule), those that are part of an array's
type (`Explicit`: a `shard_map` over them), and those of a user's `shard_map` (`Manual`: nothing to do).
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import launch

# The axes of what each function of an implementation reads and returns: B batch, N query heads, K key heads; all others
# stay on one device. None: a dataclass, whose fields declare theirs.
_QUERY, _KEY, _LSE, _BIAS = "B T N H", "B S K H", "B N T", "B N T S"
# K's mean: of a head, or of the segment of each query.
_MEAN = ("B K H", "B T K H")
_AXES: dict[str, tuple[tuple, tuple]] = dict(
    forward=((_QUERY, _KEY, _KEY, None, _MEAN), (_QUERY, _LSE, None)),
    mean_logits=((_QUERY, _KEY, None), (_LSE, _MEAN)),
    backward=((None, _QUERY, _LSE, None), (_QUERY, _KEY, _KEY, _BIAS)),
)
# Shards of the heads are cut at key heads, so both kinds of heads go by this name.
_HEADS = "K"
# Axes in front of these, from vmap.
_MAPPED = "mapped"


def align(query, key, value):
    """The same values, so placed that only batch and heads are sharded, wherever their types tell of placement.

    The type names `Explicit` mesh axes, over which all three are sharded alike, and the `Manual` ones over which a
    value varies, which a `shard_map` may check (`check_vma`). The derivative of either gathers or sums over devices.
    """
    operands = vary_alike(query, key, value)
    mesh = _mesh(operands)
    if AxisType.Explicit not in mesh.axis_types:
        return operands
    specs, _ = _specs_by_type(_axes(operands, _AXES["forward"][0]), operands)
    return _place(operands, specs, mesh)


def replicate(x) -> Any:
    """The same array, or None, on all devices, if its type tells of placement: a search works on no other."""
    mesh = _mesh([x])
    if AxisType.Explicit not in mesh.axis_types or x is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def place_like(x, other):
    """The same array where `other`, of its rank, lies by its type."""
    kind = jax.typeof(other)
    if AxisType.Explicit not in kind.sharding.mesh.axis_types:
        return x
    return jax.sharding.reshard(x, NamedSharding(kind.sharding.mesh, kind.sharding.spec))


def vary_alike(*trees):
    """The same arrays, each said to vary over all manual mesh axes that one of them varies over."""
    return launch.vary_over(launch.varying_axes(trees), trees)


def partitioned(function: Callable, name: str) -> Callable:
    """`function`, which launches kernels, and the rule by which XLA partitions it."""

    def run(*operands):
        mesh = _mesh(operands)
        if max(jax.device_count(), mesh.size) == 1 or AxisType.Manual in mesh.axis_types:
            return launch.mappable(function)(*operands)
        axes = _axes(operands, _AXES[name][0])
        return _partition(launch.keep_target(function), axes, _AXES[name][1], operands)

    return run


def over_mesh(function: Callable, name: str) -> Callable:
    """`function` of the shards that its operands have by their type."""

    def run(*operands):
        mesh = _mesh(operands)
        kinds = set(mesh.axis_types)
        # Kernels are launched where no axis is left to XLA, or all are.
        if AxisType.Explicit not in kinds and not {AxisType.Manual, AxisType.Auto} <= kinds:
            return function(*operands)
        axes = _axes(operands, _AXES[name][0])
        leaves, tree = jax.tree.flatten(operands)
        free = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
        spread = functools.partial(jax.shard_map, mesh=mesh, axis_names=free)
        whole = spread(function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        results = jax.eval_shape(whole, *tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]))
        result_axes, (results, out_tree) = _axes(results, _AXES[name][1]), jax.tree.flatten(results)
        sizes = _sizes([*axes, *result_axes], (operands, results))
        in_specs, assigned = _specs_by_type(axes, leaves)
        added = _adding(function, _sums(result_axes, results, sizes, assigned))
        if AxisType.Explicit in kinds:
            # A cotangent may come in another place than its primal.
            operands = tree.unflatten(_place(leaves, in_specs, mesh))
        out_specs = _specs(result_axes, results, assigned, sizes)
        return spread(
            added,
            in_specs=tuple(tree.unflatten(in_specs)),
            out_specs=out_tree.unflatten(out_specs),
            check_vma=bool(launch.varying_axes(operands)),
        )(*operands)

    return run


def _mesh(arrays) -> jax.sharding.AbstractMesh:
    """The mesh that the types of these arrays name, or that of the context; empty if there is none."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


@functools.cache
def _declared_axes(kind) -> dict[str, str]:
    """The axes that each field of this dataclass of arrays declares. Lower case, which stands for an axis that may have
    length 1, counts as upper case."""
    hints = {name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(kind).items()}
    return {name: array.dim_str.upper() for name, (array, *_) in hints.items()}


def _axes(values, declared: tuple, mapped=0) -> list[list[str]]:
    """The names of the axes of each leaf of `values`, of which each is None, an array, or a dataclass of arrays.

    Arrays may have `mapped` more axes, in front. Where several names are declared, the rank decides.
    """
    found = []
    for value, axes in zip(values, declared[: len(values)], strict=True):
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value)]
            found += [_declared_axes(type(value))[name] for name in fields if getattr(value, name) is not None]
        elif value is not None:
            choices = (axes,) if isinstance(axes, str) else axes
            found.append(next(x for x in choices if len(x.split()) + mapped == value.ndim))
    return [x.split() for x in found]


def _sizes(axes, values) -> dict[str, int]:
    """How long each axis is; one of length 1 is broadcast against the others of its name."""
    sizes: dict[str, int] = {}
    for names, leaf in zip(axes, jax.tree.leaves(values), strict=True):
        for name, size in zip(names, leaf.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    return sizes


def _can_be_sharded(name) -> bool:
    return name in ("B", "N", _HEADS) or name.startswith(_MAPPED)


def _cut_as(name) -> str:
    """The axis whose shards are this one's."""
    return _HEADS if name == "N" else name


def _sums(result_axes, results, sizes, assigned) -> list[tuple[str, ...]]:
    """For each result the mesh axes over which the parts of devices add up to it: the gradient of a broadcast bias."""
    found = []
    for axes, leaf in zip(result_axes, jax.tree.leaves(results), strict=True):
        names = {_cut_as(name) for name, n in zip(axes, leaf.shape, strict=True) if n != sizes[name]}
        found.append(tuple(axis for name in sorted(names) for axis in assigned.get(name, ())))
    return found


def _adding(function, sums) -> Callable:
    """`function`, each of whose results is then added up over these mesh axes."""

    def run(*operands):
        leaves, tree = jax.tree.flatten(function(*operands))
        return tree.unflatten([lax.psum(x, over) if over else x for x, over in zip(leaves, sums, strict=True)])

    return run if any(sums) else function


def _assign(axes, specs, mesh, sizes) -> dict[str, tuple[str, ...]]:
    """The mesh axes over which each axis is sharded: what the first array that is sharded along it says."""
    assigned: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for names, spec in zip(axes, specs, strict=True):
        # A spec may be shorter than the array's rank.
        for name, part in zip(names, spec, strict=False):
            name = _cut_as(name)
            if part is None or name in assigned or not _can_be_sharded(name):
                continue
            kept, shards = [], 1
            for axis in (part,) if isinstance(part, str) else part:
                shards *= mesh.shape[axis]
                if axis in used or sizes[name] % shards:
                    break
                kept.append(axis)
            if kept:
                assigned[name] = tuple(kept)
                used.update(kept)
    return assigned


def _specs(axes, leaves, assigned, sizes) -> list[PartitionSpec]:
    """Where each array lies if the axes are sharded so."""

    def part(name, size):
        return assigned.get(_cut_as(name)) if size == sizes[name] else None

    return [
        PartitionSpec(*(part(name, size) for name, size in zip(names, leaf.shape, strict=True)))
        for names, leaf in zip(axes, leaves, strict=True)
    ]


def _place(arrays, specs, mesh):
    """The arrays, moved to where these specs say."""
    return tuple(jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True))


def _specs_by_type(axes, leaves) -> tuple[list[PartitionSpec], dict]:
    """Where each array shall lie by the types of all of them, and what that assigns to which axis."""
    specs, sizes = [jax.typeof(x).sharding.spec for x in leaves], _sizes(axes, leaves)
    assigned = _assign(axes, specs, _mesh(leaves), sizes)
    return _specs(axes, leaves, assigned, sizes), assigned


def _rule(operand_axes, operands, result_axes, results, sizes) -> tuple[str, dict]:
    """What Shardy propagates: an einsum-like rule, and what it cannot say itself."""
    group = sizes["N"] // sizes[_HEADS]
    alone: list[str] = []

    def factor(name, size):
        if not _can_be_sharded(name) or size != sizes[name]:
            alone.append(f"own{len(alone)}")
            return alone[-1]
        if name == "N" and group > 1:
            if "group" not in alone:
                alone.append("group")
            return f"({_HEADS} group)"
        return _cut_as(name)

    def side(axes, values):
        arrays = zip(axes, jax.tree.leaves(values), strict=True)
        return ", ".join(" ".join(map(factor, names, leaf.shape)) for names, leaf in arrays)

    text = f"{side(operand_axes, operands)} -> {side(result_axes, results)}"
    options: dict[str, Any] = dict(group=group) if "group" in alone else {}
    return text, options | dict(need_replication_factors=tuple(alone))


def _refine(mesh) -> jax.sharding.Mesh:
    """The same devices in the same order, each axis cut into axes of prime length."""
    factors = []
    for size in mesh.devices.shape:
        for prime in range(2, size + 1):
            while size % prime == 0:
                factors.append(prime)
                size //= prime
    return jax.sharding.Mesh(mesh.devices.reshape(factors), [f"axis{i}" for i in range(len(factors))])


def _decode(sharding, shape, mesh) -> PartitionSpec:
    """A sharding of an array of this shape as a spec over a mesh from `_refine`."""
    if sharding is None:
        return PartitionSpec()
    firsts = {device: [x.start or 0 for x in at] for device, at in sharding.devices_indices_map(shape).items()}
    origin = firsts[mesh.devices.flat[0]]
    parts: list[list[tuple[int, str]]] = [[] for _ in shape]
    for i, name in enumerate(mesh.axis_names):
        neighbour = firsts[mesh.devices[tuple(int(j == i) for j in range(mesh.devices.ndim))]]
        for part, here, there in zip(parts, origin, neighbour, strict=True):
            if here != there:
                part.append((here - there, name))
    # The axis with the longest step comes first.
    return PartitionSpec(*(tuple(name for _, name in sorted(part)) or None for part in parts))


def _partition(function, axes, declared, operands, mapped=()):
    """`function` of `operands`, whose leaves have these axes, as a call that XLA partitions.

    `mapped` names the axes that vmap has put in front of some operands and of all results.
    """
    untraced, function = function, jax.jit(function)
    results = jax.eval_shape(function, *operands)
    result_axes = [[*mapped, *names] for names in _axes(results, declared, len(mapped))]
    sizes = _sizes([*axes, *result_axes], (operands, results))

    def plan(mesh, infos, out_infos):
        """What is sharded over which axis of this refined mesh, and the shardings of results and of operands."""
        leaves, tree = jax.tree.flatten(infos)
        out_leaves, out_tree = jax.tree.flatten(out_infos)
        specs = [_decode(x.sharding, x.shape, mesh) for x in leaves]
        assigned = _assign(axes, specs, mesh, sizes)
        placed = _specs(axes, leaves, assigned, sizes), _specs(result_axes, out_leaves, assigned, sizes)
        ours, theirs = ([NamedSharding(mesh, spec) for spec in specs] for specs in placed)
        return assigned, out_tree.unflatten(theirs), tree.unflatten(ours)

    def partition(mesh, infos, out_infos):
        mesh = _refine(mesh)
        assigned, *shardings = plan(mesh, infos, out_infos)
        return mesh, _adding(function, _sums(result_axes, results, sizes, assigned)), *shardings

    def infer(mesh, infos, out_infos):
        return plan(_refine(mesh), infos, out_infos)[1]

    call = custom_partitioning(lambda *operands: function(*operands))
    rule, options = _rule(axes, operands, result_axes, results, sizes)
    # Not decoded: Shardy may shard by a part of a mesh axis, for which a PartitionSpec has no name.
    call.def_partition(
        partition, infer_sharding_from_operands=infer, decode_shardings=False, sharding_rule=rule, **options
    )
    call = custom_vmap(call)

    @call.def_vmap
    def _(axis_size, in_batched, *operands):
        name = f"{_MAPPED}{len(mapped)}"
        batched = jax.tree.leaves(in_batched)
        inner = [[name] * is_batched + names for names, is_batched in zip(axes, batched, strict=True)]
        # Not what has been traced: kernels are chosen anew, knowing how many calls they are.
        many = launch.under_vmap(untraced, axis_size, in_batched)
        out = _partition(many, inner, declared, operands, (name, *mapped))
        return out, jax.tree.map(lambda _: True, out)

    return call(*operands)

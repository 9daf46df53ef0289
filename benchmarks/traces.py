"""Take kernels out of a traced function: what `attention` really launches, not a copy of how it does."""

from collections.abc import Callable

import jax
from jax.extend import core

_PREFIX = "sagebwd_"
_ATTENTION_KERNELS = ("forward", "grad")


def kernel_name(eqn) -> str | None:
    """The name of the kernel that an equation launches, without "sagebwd_"; None if it launches none of ours."""
    if eqn.primitive.name == "custom_vmap_call":
        # A kernel of Mosaic GPU is wrapped in the rules by which it is batched.
        return next(filter(None, map(kernel_name, eqn.params["call"].eqns)), None)
    name = str(eqn.params.get("name"))
    if eqn.primitive.name in ("pallas_call", "mpmd_map") and name.startswith(_PREFIX):
        return name.removeprefix(_PREFIX)
    return None


def single_kernels(function: Callable, shapes) -> dict[str, tuple[Callable, list[jax.ShapeDtypeStruct]]]:
    """Each kernel that `function` launches, as a function, and the shapes it takes; a second of one name gets "_2"."""
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    kernels, seen = {}, set()
    for eqn in jaxpr.eqns:
        name = kernel_name(eqn)
        operands = _variables(eqn)
        signature = name, tuple(str(v.aval) for v in operands)
        if name is None or signature in seen:
            continue
        seen.add(signature)
        # What nobody reads is still written, but a jaxpr cannot return it.
        results = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
        launch = core.jaxpr_as_fun(_part(jaxpr, [eqn], operands, results))
        name = f"{name}_2" if name in kernels else name
        kernels[name] = launch, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    return kernels


def split_at_kernels(function: Callable, shapes) -> tuple[Callable, Callable]:
    """(prepare, run): what makes the operands of `function`'s attention kernels; those, and what is made of theirs.

    The kernels must not need each other's results, and the function's results must come from theirs.
    """
    traced, result_shapes = jax.make_jaxpr(function, return_shape=True)(*shapes)
    jaxpr = traced.jaxpr
    before, launches, after, made = [], [], [], set()
    for eqn in jaxpr.eqns:
        reads = not made.isdisjoint(_variables(eqn))
        is_launch = _is_attention_kernel(eqn)
        if is_launch and reads:
            raise ValueError(f"{function.__name__} is not a set of independent kernels: {kernel_name(eqn)} is not")
        if is_launch or reads:
            (launches if is_launch else after).append(eqn)
            made.update(eqn.outvars)
        else:
            before.append(eqn)
    if not launches or not made.issuperset(jaxpr.outvars):
        raise ValueError(f"{function.__name__} does not return results of kernels")
    operands = [v for v in dict.fromkeys(v for eqn in launches + after for v in _variables(eqn)) if v not in made]
    constants = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    make_operands = core.jaxpr_as_fun(_part(jaxpr, before, jaxpr.invars, operands, constants))
    launch = core.jaxpr_as_fun(_part(jaxpr, launches + after, operands, jaxpr.outvars))

    def prepare(*inputs):
        return tuple(make_operands(*jax.tree.leaves(inputs)))

    def run(*operands):
        return jax.tree.unflatten(jax.tree.structure(result_shapes), launch(*operands))

    return prepare, run


def one_kernel(function: Callable, shapes, name: str) -> tuple[Callable, Callable]:
    """(prepare, run): what makes the operands of `function`'s first kernel of this name, and that kernel alone."""
    traced = jax.make_jaxpr(function)(*shapes)
    jaxpr = traced.jaxpr
    named = [eqn for eqn in jaxpr.eqns if kernel_name(eqn) == name]
    if not named:
        launched = dict.fromkeys(filter(None, map(kernel_name, jaxpr.eqns)))
        raise ValueError(f"{name!r} is not launched: {', '.join(launched)} are")
    operands = _variables(named[0])
    results = [v for v in named[0].outvars if not isinstance(v, core.DropVar)]
    constants = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    before = jaxpr.eqns[: jaxpr.eqns.index(named[0])]
    prepare = core.jaxpr_as_fun(_part(jaxpr, before, jaxpr.invars, operands, constants))
    return prepare, core.jaxpr_as_fun(_part(jaxpr, named[:1], operands, results))


def _is_attention_kernel(eqn) -> bool:
    """Whether an equation launches an attention kernel; those that quantise are not meant."""
    return (kernel_name(eqn) or "").startswith(_ATTENTION_KERNELS)


def _variables(eqn):
    """The variables that an equation reads, each once."""
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))


def _part(jaxpr, equations, inputs, outputs, constants=None):
    """A closed jaxpr of some of the equations."""
    constants = constants or {}
    part = jaxpr.replace(
        eqns=equations,
        invars=inputs,
        outvars=outputs,
        constvars=list(constants),
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return core.ClosedJaxpr(part, list(constants.values()))

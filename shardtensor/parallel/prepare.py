"""A model for a mesh with a domain: equal weights, tensor parallel, FSDP2.

Along the domain axis every rank has all weights and a part of each sample, so weight gradients have to be *summed*.
Along the data axis every rank has samples of its own, so gradients are *averaged*, as usual. There are two ways to do
both:

- Weights stay plain. Their gradients are complete over the domain after the backward pass. So the wrapper of the model
  (FSDP2, FSDP1, DDP, replicate) need not know about the domain. Inputs are ShardTensors on ``mesh["domain"]``.
- ``spmd=True``: weights are DTensors on all axes, and so is the input, with the batch sharded over the data axis. A
  gradient is a contribution on every axis, and FSDP2 sums all of them in its one reduce-scatter.

:func:`parallelize` prepares a model for either way. Each of its steps is a function of this module or of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from .._compat import flattened, register_hook
from ..communication.redistribute import redistribute_local
from ..dispatch.planning import spec_of
from ..layout.placements import AxisLayout, given_mesh
from ..ranks.equal_values import synchronize
from .units import shard_by_units


@dataclass(frozen=True)
class Parallelized:
    """The steps of :func:`parallelize`.

    Attributes:
        inputs: the mesh for the ShardTensors that the model takes.
        steps: a line for each step, also those that are left to the caller; ``str()`` joins them.
    """

    inputs: DeviceMesh
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.steps)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    data: str | None = "dp",
    domain: str = "domain",
    tensor: str | None = None,
    plan: Mapping[str, str] | None = None,
    fsdp: Sequence[str] | None = None,
    units: Sequence[type[nn.Module]] = (),
    spmd: bool = False,
    **options: Any,
) -> Parallelized:
    """Prepare a model in place for a mesh with a domain axis: equal weights, tensor parallel, FSDP2.

    Args:
        model: on the mesh's device, not wrapped yet.
        mesh: with named axes; default: that of the surrounding ``with mesh:``.
        data: the axis along which ranks have different samples. None, or a name that is not in the mesh: no such axis.
        domain: the axis over which samples are sharded.
        tensor, plan: the axis over which weights are sharded, and the weights to shard; see :func:`tensor_parallel`.
        fsdp: axes over which FSDP2 shards weights, gradients and optimizer state; default: the data axis. With the
            domain axis as well, every rank keeps ``1 / (data * domain)`` of them. With ``()`` there is no FSDP2: wrap
            the model in DDP over ``mesh[data]`` yourself.
        units: classes of modules that FSDP2 gathers one at a time. A unit's parameters have one dtype; those of other
            dtypes get units of their own, see units.py.
        spmd: whether weights are DTensors on all axes (torch 2.13 or newer).
        options: for ``fully_shard``, such as ``reshard_after_forward`` and ``mp_policy``.

    Raises:
        ValueError: axes that are not in the mesh, or that cannot be combined; a model that is not on the mesh's device,
            unless FSDP2 offloads it (``offload_policy``); a module that holds parameters of several
            dtypes, which no unit can have.

    Example::

        mesh = init_device_mesh(device_type, (4, 2), mesh_dim_names=("dp", "domain"))
        print(parallelize(model, mesh, units=[Block]))
        optimizer = torch.optim.AdamW(model.parameters())   # after it: FSDP2 replaces the parameters
        x = scatter_tensor(batch, mesh["domain"], (Shard(2),))
        loss_function(model(x), y).backward()
    """
    mesh = given_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    data = data if data in names else None
    shard = tuple(fsdp) if fsdp is not None else () if data is None else (data,)
    _check_axes(names, data, domain, tensor, plan, shard, spmd)
    axes = [n for n in names if n in (data, domain, tensor)]
    mesh = mesh[tuple(axes)]
    copies = tuple(n for n in axes if n in (data, domain) and n not in shard)
    options |= _spmd_options(shard, copies) if spmd else {}
    synchronize(model, mesh, offloaded=options.get("offload_policy") is not None)
    steps = [f"weights and buffers: rank 0's on all ranks of {_named(mesh, axes)}"]

    inputs = mesh if spmd else mesh[tuple(n for n in axes if n != data)]
    if tensor is not None and plan is not None:
        styles = tensor_parallel(model, inputs, plan, tensor=tensor)
        steps.append(f"tensor parallel over {tensor!r}: {', '.join(f'{n} {how}' for n, how in styles.items())}")
    if spmd:
        _distribute(model, mesh)
        contribute_gradients(model)
        steps.append(f"weights: DTensors on {_named(mesh, axes)}; gradients are contributions")
    about_units: tuple[str, ...] = ()
    if shard or spmd:
        _check_no_empty_shard(model)
        about_units = shard_by_units(model, units, mesh if spmd else _fsdp_mesh(mesh, shard, data), options)
        for module in model.modules():
            if spmd and isinstance(module, FSDPModule):
                # Contributions add up to the gradient of the global batch's loss, so nothing is to be divided.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    steps += [*_about_gradients(model, data, shard, copies, spmd), *about_units]
    steps.append(_about_inputs(axes, data, domain, tensor, spmd))
    return Parallelized(inputs, tuple(steps))


def _check_axes(
    names: Sequence[str],
    data: str | None,
    domain: str,
    tensor: str | None,
    plan: Mapping[str, str] | None,
    shard: Sequence[str],
    spmd: bool,
) -> None:
    for name in (domain, tensor, *shard):
        if name is not None and name not in names:
            raise ValueError(f"the mesh has no axis {name!r}, only {tuple(names)}; name its axes (mesh_dim_names)")
    if (tensor is None) != (plan is None):
        raise ValueError("tensor parallel needs both: the axis (tensor=) and which layers to shard (plan=)")
    if not set(shard) <= {data, domain}:
        raise ValueError(f"fsdp={tuple(shard)}: it may name the data axis {data!r} and the domain axis {domain!r}")
    if tensor is not None and domain in shard and not spmd:
        raise ValueError(
            f"weights sharded over {tensor!r} are DTensors on {domain!r} as well, over which FSDP2 cannot shard them, "
            "too; use spmd=True, or leave fsdp out"
        )
    positions = [names.index(n) for n in (data, domain, tensor) if n is not None]
    if positions != sorted(positions):
        raise ValueError(f"mesh axes {tuple(names)}: order them data, domain, tensor, those that communicate most last")


def _fsdp_mesh(mesh: DeviceMesh, shard: Sequence[str], data: str | None) -> DeviceMesh:
    """The mesh for ``fully_shard`` of plain weights, whose gradients are equal along the domain axis already."""
    if len(shard) == 2:
        return flattened(mesh[tuple(sorted(shard, key=(mesh.mesh_dim_names or ()).index))])
    if data in shard or data is None:
        return mesh[shard[0]]
    return mesh[(data, shard[0])]  # replicated over the first, sharded over the second


def _check_no_empty_shard(model: nn.Module) -> None:
    """FSDP2 raises on the ranks that have an empty shard, while the others wait for them."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            for m, sizes in spec_of(parameter).shard_sizes.items():
                if 0 in sizes:
                    raise ValueError(
                        f"{name} {tuple(parameter.shape)} is sharded {sizes} on mesh dim {m}: FSDP2 takes no empty "
                        "shards; shard it over fewer ranks, or not at all"
                    )


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, for gradients on several meshes.

    Gradients are on several meshes if only some weights are sharded over a tensor axis. torch cannot combine their
    norms. Returns the norm of all gradients, a plain tensor, equal on all ranks.

    Raises:
        RuntimeError: the norm is infinite or NaN, with ``error_if_nonfinite``.

    Example::

        parallelize(model, mesh, tensor="tp", plan=plan)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        grad = parameter.grad
        if grad is not None:
            by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
    grads = [[p.grad for p in some if p.grad is not None] for some in by_mesh.values()]
    norms = [nn.utils.get_total_norm(some, norm_type) for some in grads]
    reduced = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = nn.utils.get_total_norm(reduced, norm_type, error_if_nonfinite)
    for some in by_mesh.values():
        nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return total


def _about_gradients(
    model: nn.Module, data: str | None, shard: Sequence[str], copies: Sequence[str], spmd: bool
) -> Iterator[str]:
    """What becomes of gradients, once the model is prepared: by FSDP2, or by the caller."""
    if shard or spmd:
        over, each = (" and ".join(map(repr, some)) or "no axis" for some in (shard, copies))
        yield f"FSDP2: weights, gradients and optimizer state sharded over {over}, copies over {each}"
        if len({p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}) > 1:
            yield "gradients are on several meshes: clip them with shardtensor.parallel.clip_grad_norm_"
    elif data is not None:
        yield f"data parallel: left to you, e.g. DistributedDataParallel(model, device_mesh=mesh[{data!r}])"


def _about_inputs(axes: Sequence[str], data: str | None, domain: str, tensor: str | None, spmd: bool) -> str:
    places = {data: "Shard(0)" if spmd else None, domain: "Shard(d)", tensor: "Replicate()"}
    on = [n for n in axes if places[n]]
    text = f"inputs: ShardTensors on mesh[{', '.join(map(repr, on))}], ({', '.join(str(places[n]) for n in on)})"
    if spmd:
        return f"{text}; the loss is the global batch's"
    if data is None:
        return text
    return f"{text}; along {data!r} each rank has a batch of its own, all of one size, and its mean loss"


def _named(mesh: DeviceMesh, axes: Sequence[str]) -> str:
    return " x ".join(f"{n}={size}" for n, size in zip(axes, mesh.shape, strict=True))


# -- DTensor weights --------------------------------------------------------------------------------------------------

# For each style of torch's plans for linear layers: the dim of weight and bias to shard (None: replicated).
_LINEAR: dict[str, dict[str, int | None]] = {
    "colwise": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1, "bias": None},
}


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], *, tensor: str = "tp"
) -> dict[str, str]:
    """Shard linear layers in place over the axis ``tensor`` of ``mesh``. Returns ``{name: style}``.

    Args:
        model: its weights equal on all ranks of the mesh.
        mesh: the mesh of the inputs, e.g. ``mesh["domain", "tp"]``. Inputs are Replicate on the tensor axis.
        plan: ``{pattern of module names: "colwise" or "rowwise"}``, with shell-style patterns (``"blocks.*.mlp.up"``).
            A colwise layer shards its outputs, and sends nothing. A rowwise layer after it takes inputs in this layout.
            Its result is Partial, and reduced over the axis when it is needed.

    Raises:
        ValueError: a pattern matches no module, or a style is neither of these.
        TypeError: a module is not ``nn.Linear``.

    Example::

        tensor_parallel(model, mesh["domain", "tp"], {"mlp.up": "colwise", "mlp.down": "rowwise"})
    """
    axis = (mesh.mesh_dim_names or ()).index(tensor)
    styles: dict[str, str] = {}
    for pattern, how in plan.items():
        if how not in _LINEAR:
            raise ValueError(f"plan for {pattern!r}: {how!r}; choose one of {tuple(_LINEAR)}")
        matched = [(n, m) for n, m in model.named_modules() if fnmatchcase(n, pattern)]
        if not matched:
            raise ValueError(f"no module of {type(model).__name__} is called {pattern!r}")
        for name, module in matched:
            if not isinstance(module, nn.Linear):
                raise TypeError(f"{name} is a {type(module).__name__}; only nn.Linear can be sharded by a plan")
            styles[name] = how
            for key, dim in _LINEAR[how].items():
                placements: list[Placement] = [Replicate()] * mesh.ndim
                if dim is not None:
                    placements[axis] = Shard(dim)
                old = getattr(module, key)
                if old is not None:
                    new = distribute_tensor(old.detach(), mesh, placements, src_data_rank=None)
                    module.register_parameter(key, nn.Parameter(new, requires_grad=old.requires_grad))
    return styles


def _distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace plain parameters, which are equal on all ranks, by replicated DTensors. Buffers stay plain."""
    made: dict[Tensor, nn.Parameter] = {}  # modules may share a parameter
    for module in model.modules():
        for key, old in module.named_parameters(recurse=False):
            if isinstance(old, DTensor):
                continue
            if old not in made:
                new = DTensor.from_local(old.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
                made[old] = nn.Parameter(new, requires_grad=old.requires_grad)
            module.register_parameter(key, made[old])


def contribute_gradients(model: nn.Module) -> None:
    """Make all gradients of replicated DTensor parameters contributions, ``Partial()``.

    FSDP2 with ``dp_mesh_dims`` sums gradients over these axes, as if each was a contribution. Gradients from
    ShardTensors are contributions. But operators of DTensor (``softplus(self.step) * x``) may give a parameter a
    complete gradient, which would be added once per rank. After this call, one rank keeps such a gradient, and the
    others get zeros.

    Example::

        distribute_module(model, mesh)
        contribute_gradients(model)
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "domain")))
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    """
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(_watch)


def _watch(module: nn.Module, _: object) -> None:
    """A forward pre-hook that puts :func:`_as_contribution` on the module's parameters."""
    # In each forward pass, as FSDP2 replaces the sharded parameters by gathered ones just before it.
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor) and parameter.requires_grad and not hasattr(parameter, "_contributes"):
            register_hook(parameter, _as_contribution)
            parameter._contributes = True  # type: ignore[attr-defined]


@torch.no_grad()
def _as_contribution(grad: Tensor) -> Tensor:
    if not isinstance(grad, DTensor):
        return grad
    mesh, old = grad.device_mesh, spec_of(grad)
    # One rank's copy becomes its contribution, the others' become zeros; nothing is sent.
    new = old.with_axes({m: AxisLayout(Partial()) for m, p in enumerate(old.placements) if p.is_replicate()})
    if new.lies_like(old):
        return grad
    local = redistribute_local(grad.to_local(), old, new)
    return DTensor.from_local(local, mesh, new.placements, run_check=False, shape=grad.shape, stride=grad.stride())


def _spmd_options(shard: tuple[str, ...], replicate: tuple[str, ...]) -> dict[str, Any]:
    """Arguments with which ``fully_shard`` reduces the gradients of DTensors on a mesh over these axes of it."""
    if not hasattr(fsdp, "DataParallelMeshDims"):
        raise ValueError(f"spmd=True needs FSDP2's dp_mesh_dims, which torch {torch.__version__} lacks (2.13 has it)")
    return {"dp_mesh_dims": fsdp.DataParallelMeshDims(shard=shard or None, replicate=replicate or None)}

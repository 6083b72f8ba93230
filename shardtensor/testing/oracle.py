"""The oracle: a function on shards must give what it gives on the global tensor, in this process.

[Note: the comparison] Every rank holds the same global tensors. It runs the function on them, then on their shards, and
compares its shards of outputs, gradients of the inputs and gradients of the parameters with its parts of the global
ones, for the same random cotangents. So nothing is gathered but contributions (Partial). At the end the ranks compare
the layouts that they have compared by, and tell each other what differs: a wrong value on one rank is an error on all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._compat import tree_leaves
from ..layout.intervals import chunk_sizes
from ..layout.placements import ShardSizes, by_mesh_dim
from ..ranks.agreement import check_same, texts_over_mesh
from ..ranks.differences import by_rank
from .mesh import shared_mesh

# rtol and atol, chosen for sums of a few hundred products.
_TOLERANCES = {
    torch.float64: (1e-10, 1e-12),
    torch.complex128: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (3e-2, 3e-2),
}


def shard(
    tensor: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shard_sizes: ShardSizes | None = None,
    requires_grad: bool = False,
) -> Any:
    """Shard a tensor that every rank holds; the result is a leaf, made without communication.

    ``shard_sizes`` is as for :meth:`ShardTensor.from_local`; None: torch.chunk's sizes. On a ``Partial``
    mesh dim the ranks get different values whose sum is the tensor.

    >>> def sharded():
    ...     x = shard(torch.arange(8.0), shared_mesh(2), [Shard(0)], (5, 3))
    ...     return x.to_local().tolist()
    >>> run_distributed(sharded, 2)  # doctest: +SKIP
    [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]
    """
    from shardtensor import ShardTensor

    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"this rank is not in the mesh {mesh}")
    asked = by_mesh_dim(shard_sizes, placements, mesh)
    local, sizes = tensor.detach(), dict(asked) if isinstance(asked, dict) else {}
    for mesh_dim, placement in enumerate(placements):
        here, ranks = coordinate[mesh_dim], mesh.size(mesh_dim)
        if isinstance(placement, Shard):
            length = local.shape[placement.dim]
            pieces = sizes.setdefault(mesh_dim, chunk_sizes(length, ranks))
            if len(pieces) != ranks or sum(pieces) != length:
                raise ValueError(f"sizes {pieces} on mesh dim {mesh_dim} do not shard {length} over {ranks} ranks")
            local = local.narrow(placement.dim, sum(pieces[:here]), pieces[here])
        elif isinstance(placement, Partial):
            if placement.reduce_op != "sum":
                raise ValueError(f"mesh dim {mesh_dim}: can only make Partial('sum') of a tensor, not {placement}")
            # Rank r > 0 holds the constant r, the first rank the rest.
            local = torch.full_like(local, here) if here else local - ranks * (ranks - 1) // 2
    local = local.clone()
    return ShardTensor.from_local(local, mesh, placements, shard_sizes=sizes).requires_grad_(requires_grad)


def assert_matches_unsharded(
    fn_or_module: Callable[..., Any],
    *tensors: Any,
    placements: Sequence[Any],
    mesh_shape: int | tuple[int, ...] | None = None,
    mesh: DeviceMesh | None = None,
    shard_sizes: ShardSizes | Sequence[ShardSizes | None] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    check_grads: bool = True,
) -> Any:
    """Assert that a function returns the same on shards as on global tensors. Every rank must make the same call.

    It compares outputs, gradients of all floating-point inputs, gradients of a module's parameters, and its buffers. It
    checks that local shapes fit the spec, and that gradients have the layout of their inputs. Gradients of parameters
    must be equal on all ranks. A module is copied, and does not change.

    >>> def check_conv():
    ...     torch.manual_seed(0)
    ...     conv = nn.Conv1d(2, 3, kernel_size=3, padding=1).double()
    ...     x = torch.randn(1, 2, 8, dtype=torch.float64)
    ...     assert_matches_unsharded(conv, x, mesh_shape=2, placements=[Shard(2)], shard_sizes=(5, 3))
    >>> run_distributed(check_conv, 2)  # doctest: +SKIP

    Args:
        tensors: the global arguments, the same on every rank. Other arguments are passed unchanged.
        placements: of all tensors, or one list (None: left plain) per argument.
        mesh_shape, mesh: the mesh, or the shape of one from :func:`shared_mesh`.
        shard_sizes: of all tensors, or a list with those of each argument.
        rtol, atol: tolerances; default: chosen for the dtype. ``atol`` is relative to the largest reference value, if
            that exceeds one.

    Returns:
        The function's result on shards.
    """
    if mesh is None:
        if mesh_shape is None:
            raise TypeError("assert_matches_unsharded needs a mesh or a mesh_shape")
        mesh = shared_mesh(mesh_shape)
    if mesh.get_coordinate() is None:
        return None
    check = _Comparison(mesh, rtol, atol)
    all_placements, all_sizes = _per_argument(tensors, placements, shard_sizes)

    def arguments(sharded: bool) -> list[Any]:
        made = []
        for value, places, sizes in zip(tensors, all_placements, all_sizes):
            if isinstance(value, Tensor):
                needs_grad = check_grads and (value.is_floating_point() or value.is_complex())
                if sharded and places is not None:
                    value = shard(value, mesh, places, sizes, requires_grad=needs_grad)
                else:
                    value = value.detach().clone().requires_grad_(needs_grad)
            made.append(value)
        return made

    def run(sharded: bool) -> tuple[Any, list[Any], Any, list[Any]]:
        function = copy.deepcopy(fn_or_module) if isinstance(fn_or_module, nn.Module) else fn_or_module
        inputs = arguments(sharded)
        result = function(*inputs)
        return function, inputs, result, tree_leaves(result)

    reference, reference_inputs, _, reference_outputs = run(sharded=False)
    candidate, inputs, result, outputs = run(sharded=True)
    if len(outputs) != len(reference_outputs):
        raise AssertionError(f"{len(outputs)} outputs on shards, {len(reference_outputs)} on global tensors")
    for i, pair in enumerate(zip(outputs, reference_outputs)):
        check.output(f"output {i}", *pair)

    if check_grads:
        _backward(reference_outputs, reference_outputs)
        _backward(outputs, reference_outputs)
        for i, (value, expected) in enumerate(zip(inputs, reference_inputs)):
            if isinstance(value, Tensor) and value.requires_grad:
                check.input_gradient(f"gradient of input {i}", value, expected.grad)
    if isinstance(reference, nn.Module):
        for (name, parameter), expected in zip(candidate.named_parameters(), reference.parameters()):
            if check_grads:
                check.optional_values(f"gradient of parameter {name}", parameter.grad, expected.grad)
        for (name, buffer), expected in zip(candidate.named_buffers(), reference.buffers()):
            check.optional_values(f"buffer {name}", buffer, expected)
    check.raise_problems()
    return result


def _backward(outputs: list[Any], references: list[Any]) -> None:
    """Backpropagate random cotangents, the same for the same references."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    roots, cotangents = [], []
    for output, reference in zip(outputs, references):
        if isinstance(reference, Tensor) and reference.requires_grad:
            cotangent = torch.randn(reference.shape, dtype=reference.dtype, generator=generator)
            if isinstance(output, Tensor) and output.requires_grad and output.shape == reference.shape:
                roots.append(output)
                cotangents.append(_sharded_like(output, cotangent.to(output.device, output.dtype)))
    if roots:
        torch.autograd.backward(roots, cotangents)


def _sharded_like(output: Tensor, cotangent: Tensor) -> Tensor:
    """The gradient of an output, in its layout; the same for each of the contributions to a Partial."""
    if not isinstance(output, DTensor):
        return cotangent
    placements = [Replicate() if p.is_partial() else p for p in output.placements]
    sharded: Tensor = shard(cotangent, output.device_mesh, placements, _sizes(output))
    return sharded


class _Comparison:
    """Collects what differs, and raises at the end."""

    def __init__(self, mesh: DeviceMesh, rtol: float | None, atol: float | None) -> None:
        self.mesh, self.rtol, self.atol = mesh, rtol, atol
        self.coordinate = tuple(mesh.get_coordinate() or ())
        self.problems: list[str] = []
        self.layouts: list[str] = []

    def output(self, what: str, value: object, expected: object) -> None:
        """Compare an output."""
        if not isinstance(expected, Tensor):
            if value != expected:
                self.problems.append(f"{what}: {value!r} instead of {expected!r}")
        elif not isinstance(value, Tensor):
            self.problems.append(f"{what}: a {type(value).__name__} instead of a tensor")
        else:
            where = self.layout(what, value)
            self.values(where, value, expected)
            if value.requires_grad != expected.requires_grad:
                asked = f"{value.requires_grad} instead of {expected.requires_grad}"
                self.problems.append(f"{where}: requires_grad is {asked}")

    def input_gradient(self, what: str, value: Tensor, expected: Tensor | None) -> None:
        """Compare the gradient of ``value``, which must have the layout of ``value``."""
        grad = value.grad
        if not isinstance(value, DTensor) or grad is None:
            self.optional_values(what, grad, expected)
            return
        if type(grad) is not type(value):
            self.problems.append(f"{what}: a {type(grad).__name__}, but the input is a {type(value).__name__}")
            return
        assert isinstance(grad, DTensor)
        where = self.layout(what, grad)
        # The gradient of each rank's summand is the gradient of the sum.
        placements = tuple(Replicate() if p.is_partial() else p for p in value.placements)
        if tuple(grad.placements) != placements or _sizes(grad) != _sizes(value):
            self.problems.append(f"{where}: the input has placements {value.placements}, sizes {_sizes(value)}")
        self.optional_values(where, grad, expected)

    def layout(self, what: str, value: Tensor) -> str:
        """Compare a ShardTensor's local shape with its own sizes; return ``what`` with the layout added."""
        if not isinstance(value, DTensor):
            return what
        sizes, local = _sizes(value), value.to_local().shape
        described = f"placements {tuple(value.placements)}, sizes {sizes}"
        where = f"{what} ({described}, this rank's shard {tuple(local)})"
        self.layouts.append(f"{what} (shape {tuple(value.shape)}, {described})")
        sharded = {mesh_dim: p.dim for mesh_dim, p in enumerate(value.placements) if isinstance(p, Shard)}
        if len(set(sharded.values())) < len(sharded):
            return where  # a dim sharded twice: the sizes on one mesh dim are not those of the shards
        expected = list(value.shape)
        for mesh_dim, pieces in sizes.items():
            dim = sharded[mesh_dim]
            if sum(pieces) != value.shape[dim]:
                self.problems.append(f"{where}: the sizes do not add up to {value.shape[dim]}")
            expected[dim] = pieces[self.coordinate[mesh_dim]]
        if list(local) != expected:
            self.problems.append(f"{where}: the sizes say a shard of {tuple(expected)}")
        return where

    def optional_values(self, what: str, value: Tensor | None, expected: Tensor | None) -> None:
        """Like :meth:`values`; where no gradient is expected, zeros are right as well."""
        if value is None and expected is None:
            return
        if value is None:
            self.problems.append(f"{what}: missing")
        else:
            zeros = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            self.values(what, value, zeros if expected is None else expected)

    def values(self, what: str, value: Tensor, expected: Tensor) -> None:
        """Compare shapes, dtypes and this rank's values."""
        value, expected = value.detach(), expected.detach()
        if value.shape != expected.shape or value.dtype != expected.dtype:
            described = [f"{tuple(t.shape)} {t.dtype}" for t in (value, expected)]
            self.problems.append(f"{what}: {described[0]} instead of {described[1]}")
            return
        value, start = self.part(value)
        if not expected.numel():
            return
        rtol, atol = _TOLERANCES.get(expected.dtype, (0.0, 0.0))
        rtol, atol = (rtol if self.rtol is None else self.rtol), (atol if self.atol is None else self.atol)
        finite = expected[expected.isfinite()]
        scale = max(1.0, finite.abs().max().item()) if finite.numel() and finite.dtype != torch.bool else 1.0
        for dim, n in enumerate(value.shape):
            expected = expected.narrow(dim, start[dim], n)
        if expected.dtype == torch.bool:
            value, expected = value.int(), expected.int()
        wrong = ~torch.isclose(value, expected, rtol=rtol, atol=atol * scale, equal_nan=True)
        if wrong.any():
            difference = torch.where(wrong, (value - expected).abs().double().nan_to_num(float("inf")), -1.0)
            index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
            self.problems.append(
                f"{what}: {int(wrong.sum())} of {wrong.numel()} values differ, by up to {difference.max().item():.3g} "
                f"(allowed: {rtol:.3g} relative, {atol * scale:.3g} absolute), at "
                f"{tuple(map(sum, zip(start, index)))}: {value[index].item()} instead of {expected[index].item()}"
            )

    def part(self, value: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """What this rank compares of a tensor, and the index of its first element: its shard, or all of a Partial."""
        from shardtensor import ShardTensor

        if not isinstance(value, ShardTensor) or value._spec.partial_mesh_dims():
            return value.full_tensor() if isinstance(value, DTensor) else value, (0,) * value.ndim
        return value.to_local(), tuple(value._spec.own_interval(dim)[0] for dim in range(value.ndim))

    def raise_problems(self) -> None:
        """Raise on all ranks if anything differs on any."""
        rows = check_same("layouts of the results", self.layouts, self.mesh, [len(self.problems)]).values()
        if any(count for [count] in rows):
            where = f"at {self.coordinate} of a mesh of {tuple(self.mesh.shape)}"
            found = by_rank(texts_over_mesh("; ".join(self.problems) or "nothing differs", self.mesh))
            header = f"sharded and unsharded results differ {where}:"
            raise AssertionError("\n  ".join([header, *(self.problems or [found])]))


def _sizes(value: DTensor) -> dict[int, tuple[int, ...]]:
    """``shard_sizes`` of a ShardTensor; a DTensor has torch.chunk's."""
    sizes = getattr(value, "shard_sizes", None)
    if sizes is None:
        sharded = [(m, p.dim) for m, p in enumerate(value.placements) if isinstance(p, Shard)]
        sizes = {m: chunk_sizes(value.shape[dim], value.device_mesh.size(m)) for m, dim in sharded}
    return {mesh_dim: tuple(pieces) for mesh_dim, pieces in sizes.items()}


def _per_argument(
    tensors: Sequence[object],
    placements: Sequence[Placement] | Sequence[Sequence[Placement] | None],
    shard_sizes: ShardSizes | Sequence[ShardSizes | None] | None,
) -> tuple[list[Any], list[Any]]:
    """Placements and sizes of each argument, where they may be given once for all of them."""
    once = all(isinstance(p, Placement) for p in placements)
    each_placements: list[Any] = [placements] * len(tensors) if once else list(placements)
    once = shard_sizes is None or isinstance(shard_sizes, Mapping) or all(isinstance(n, int) for n in shard_sizes)
    each_sizes: list[Any] = [shard_sizes] * len(tensors) if once else list(shard_sizes or ())
    if not len(each_placements) == len(each_sizes) == len(tensors):
        raise ValueError(
            f"{len(tensors)} arguments, but placements for {len(each_placements)} and shard_sizes for {len(each_sizes)}"
        )
    return each_placements, each_sizes

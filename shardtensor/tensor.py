"""``ShardTensor``: a DTensor whose shards may have any sizes.

[Note: gradients are global] A gradient is a ShardTensor like any other: a global value in some placement. The
gradient of a Partial is Replicate (each contribution has the derivative of the sum); every other gradient may arrive
in any placement and cut, and whoever needs a particular one redistributes. At the two borders, ``from_local`` and
leaf tensors, gradients are put into the layout of the tensor they belong to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from . import checkpoint, dispatch
from ._compat import (
    DisableTorchFunction,
    TensorMeta,
    alias,
    claim_dispatch,
    current_mesh,
    is_traced,
    keep_static,
    new_wrapper,
    not_in_graphs,
    same_memory,
    tracing,
    uncached,
    unflattened,
    without_zero_tensor,
)
from .agreement import MAX_NDIM, agree_on_local
from .copies import check_current, mark_copied
from .dispatch import SCALARS, spec_of, wrap
from .errors import UnsupportedSharding, refuse
from .redistribute import redistribute_local
from .registry import FUNCTIONS
from .spec import ShardTensorSpec, mesh_coordinate

__all__ = [
    "ShardTensor",
    "as_gradient",
    "call_registered",
    "from_part",
    "mark_leaf",
    "promote",
    "redistribute_to",
    "to_part",
]


class ShardTensor(DTensor):
    """A tensor cut over a device mesh into shards of any sizes, which acts like the whole tensor.

    Create one by :meth:`from_local`, :func:`shardtensor.scatter_tensor` or :meth:`from_dtensor`. Operators called on
    it give what one device would give, or raise :class:`shardtensor.UnsupportedSharding` on every rank.

    Example (``torchrun --nproc-per-node 2``)::

        mesh = init_device_mesh("cpu", (2,))
        image = torch.rand(1, 3, 10, 16) if dist.get_rank() == 0 else None
        x = scatter_tensor(image, 0, mesh, (Shard(2),), shard_sizes={0: (3, 7)})
        y = nn.Conv2d(3, 8, 3, padding=1)(x)  # plain module, plain weights
        y.mean().backward()                   # weight gradients are plain and complete
    """

    _local_tensor: Tensor
    _spec: ShardTensorSpec
    # See copies.py.
    _copied: Any = ()
    _viewed: Any = None

    # -- construction and conversion ----------------------------------------------------------------------

    @staticmethod
    @not_in_graphs("make ShardTensors outside of compiled functions, and pass them in")
    def from_local(  # type: ignore[override]
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        shard_sizes: Mapping[int, Sequence[int]] | str | None = None,
    ) -> ShardTensor:
        """Make a ShardTensor of the shards that the ranks hold. Differentiable.

        Args:
            local_tensor: this rank's shard (Shard), copy (Replicate) or contribution (Partial).
            device_mesh: default: the mesh of the surrounding ``with mesh:``.
            placements: one per mesh dim; default: Replicate everywhere.
            shard_sizes: ``{mesh_dim: (size on rank 0, size on rank 1, ...)}`` for every sharded mesh dim: no
                communication. "even": torch.chunk's sizes, no communication; for a mesh dim left out of the dict
                too. None: the sizes are inferred with one small all-gather per mesh dim, which also checks that
                the ranks agree on dtype, number of dims and the other sizes.

        Raises:
            ValueError: sizes that do not fit the local tensor, or ranks that do not agree. With sizes given, a
                misfit is seen only by the rank that has it, unless ``SHARDTENSOR_DEBUG=1`` makes the ranks compare.
            TypeError: ``local_tensor`` is no plain tensor.

        Example::

            x = ShardTensor.from_local(torch.rand(5 if rank == 0 else 3, 4), mesh, (Shard(0),),
                                       shard_sizes={0: (5, 3)})  # x.shape == (8, 4)
        """
        mesh = device_mesh if device_mesh is not None else current_mesh()
        if placements is None:
            placements = [Replicate()] * mesh.ndim
        spec = agree_on_local(local_tensor, mesh, placements, shard_sizes)
        return _FromLocal.apply(local_tensor, spec)

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> ShardTensor:
        """The same tensor as a ShardTensor (shards as torch.chunk cuts them). Differentiable, no copy.

        Its gradient comes back as contributions, ``Partial()``, on every mesh dim where it is Replicate, see
        [Note: contributions] in parameters.py.
        """
        if isinstance(dtensor, ShardTensor):
            return dtensor
        spec = spec_of(dtensor)
        grad_spec = spec.for_contributions()
        return _FromLocal.apply(dtensor.to_local(grad_placements=grad_spec.placements), spec, grad_spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:  # type: ignore[override]
        """This rank's shard, copy or contribution as a plain tensor. Differentiable.

        Args:
            grad_placements: how the gradient of the result lies on the ranks; default: like this tensor (Replicate
                for a Partial). ``Partial()`` on a mesh dim where the ranks use their copy for different work.
        """
        if self._viewed is not None:
            check_current("to_local", self)
        differentiable = torch.is_grad_enabled() and self.requires_grad
        if grad_placements is None and not differentiable:
            return self._local_tensor
        spec = self._spec.for_gradient()
        if grad_placements is not None:
            sizes = tuple(s if p == q else None for s, p, q in zip(spec.sizes, spec.placements, grad_placements))
            if sizes != spec.sizes or any(isinstance(p, Shard) and s is None for p, s in zip(grad_placements, sizes)):
                raise ValueError(f"grad_placements {tuple(grad_placements)} shard otherwise than {self._spec}")
            spec = spec.replace(placements=grad_placements)
        return _ToLocal.apply(self, spec) if differentiable else self._local_tensor

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:  # type: ignore[override]
        """The whole tensor on every rank, as a plain tensor: gathers and reduces. Differentiable.

        Args:
            grad_placements: how the gradient of the result lies on the ranks; default Replicate, for a loss that
                every rank computes alike.
        """
        whole = redistribute_to(self, self._spec.replicated())
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        shard_sizes: Mapping[int, Sequence[int]] | str | None = None,
        async_op: bool = False,
    ) -> ShardTensor:
        """Move to other placements and / or other shard sizes on the same mesh. Differentiable.

        Args:
            device_mesh: None or this tensor's mesh.
            placements: one per mesh dim; default: as they are.
            shard_sizes: new sizes by mesh dim. Mesh dims left out keep their sizes where the placement stays, and
                get torch.chunk's otherwise. "even": torch.chunk's everywhere.
            async_op: accepted for DTensor's sake; the result is complete in any case.

        Raises:
            ValueError: another mesh, placements or sizes that do not fit, a Shard to become ``Partial("max")``.

        Example::

            x = x.redistribute(shard_sizes="even")        # rebalance
            x = x.redistribute(placements=(Shard(3),))    # cut another dim instead
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise ValueError(f"redistribute to another mesh ({device_mesh}) is not possible; this is {self._spec}")
        return redistribute_to(self, self._target_spec(placements, shard_sizes))

    def _target_spec(
        self, placements: Sequence[Placement] | None, shard_sizes: Mapping[int, Sequence[int]] | str | None
    ) -> ShardTensorSpec:
        old = self._spec
        meta = old.tensor_meta
        new = ShardTensorSpec.make(
            old.mesh,
            old.placements if placements is None else placements,
            meta.shape,
            meta.dtype,
            shard_sizes=shard_sizes,
            stride=meta.stride,
        )
        if isinstance(shard_sizes, str):
            return new
        given = {m % old.mesh.ndim for m in shard_sizes or {}}
        keep = [m for m in range(old.mesh.ndim) if old.placements[m] == new.placements[m] and m not in given]
        return new.replace(sizes=tuple(old.sizes[m] if m in keep else new.sizes[m] for m in range(old.mesh.ndim)))

    @property
    def shard_sizes(self) -> dict[int, tuple[int, ...]]:
        """``{mesh_dim: (size on rank 0, size on rank 1, ...)}`` for the sharded mesh dims."""
        return self._spec.shard_sizes

    # Asked for all the time, and known without the way through torch functions.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._spec.tensor_meta.shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._spec.tensor_meta.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._spec.tensor_meta.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._local_tensor.device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        with DisableTorchFunction():
            return Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        mark_leaf(self, value)

    # -- torch's protocols --------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("out") is not None:
            return _write_out(func, args, kwargs)
        if func in FUNCTIONS or isinstance(func, torch._ops.OpOverload):
            result = call_registered(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if len(args) > 1 or kwargs or type(args[0]) in (list, tuple):
            args, kwargs = _promote_operands(func, args, kwargs)
        return DTensor.__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        return dispatch.run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{self._spec}, rank {self._spec.coordinate} holds\n{self._local_tensor}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf ShardTensors support deepcopy, as with plain tensors; detach() it first")
        new = _leaf(copy.deepcopy(self._local_tensor, memo), self._spec, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            new._is_param = True  # how torch marks a Parameter of a tensor subclass
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_traced(self._local_tensor):  # torch 2.11 would pickle it to have a key for its graph
            self._stable_hash_for_caching()
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (self._local_tensor, self._spec, self.requires_grad, is_parameter)

    def __getstate__(self) -> Any:
        raise TypeError("ShardTensor pickles through __reduce_ex__")

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return checkpoint.write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return checkpoint.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._local_tensor

    # -- torch.compile: see docs/compile.md ---------------------------------------------------------------

    # Every length counts, see [Note: guards] in spec.py.
    _dynamo_static_indices = set(range(MAX_NDIM))

    def __tensor_flatten__(self):  # type: ignore[no-untyped-def]
        if self._viewed is not None and not is_traced(self._local_tensor):
            raise refuse(
                "torch.compile",
                self,
                "an input stands for a view but is a copy on this rank, and a graph could not keep both alike",
                "pass its clone()",
            )
        keep_static(self._local_tensor)
        return super().__tensor_flatten__()

    @staticmethod
    def __tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride):  # type: ignore[no-untyped-def]
        mesh, placements, order, dtype, requires_grad = unflattened(inner_tensors, flatten_spec)
        meta = TensorMeta(torch.Size(outer_size), tuple(outer_stride), dtype)
        spec = ShardTensorSpec.of(mesh, placements, meta, order.sizes)
        return new_wrapper(ShardTensor, inner_tensors["_local_tensor"], spec, requires_grad)

    def __coerce_tangent_metadata__(self) -> ShardTensor:
        return redistribute_to(self, self._spec.for_gradient())

    def __coerce_same_metadata_as_tangent__(self, flatten_spec, expected_type=None):  # type: ignore[no-untyped-def]
        if expected_type is not None:
            return None
        _, placements, order, _, _ = unflattened({"device_mesh": self.device_mesh}, flatten_spec)
        return redistribute_to(self, self._spec.replace(placements=placements, sizes=order.sizes))

    def _stable_hash_for_caching(self) -> str:
        # A graph depends on this rank's place, on the registry and on this package; only its kernels are kept on disk.
        raise uncached("graphs of ShardTensors are not kept")


dispatch._tensor_class = ShardTensor
claim_dispatch(ShardTensor)


# -- autograd borders -------------------------------------------------------------------------------------


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: Tensor, spec: ShardTensorSpec, grad_spec: ShardTensorSpec | None = None
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.grad_spec = spec.for_gradient() if grad_spec is None else grad_spec
        return _wrapped(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        if grad is None:
            return None, None, None
        grad = _laid_out(grad, ctx.grad_spec)
        if not torch.is_grad_enabled():
            return grad.to_local(), None, None
        # What the ranks contribute to a Partial is different: so is what they do with its one gradient.
        pairs = zip(ctx.spec.placements, ctx.grad_spec.placements, strict=True)
        contributed = [Partial() if p.is_partial() and q.is_replicate() else q for p, q in pairs]
        return grad.to_local(grad_placements=contributed), None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor, grad_spec: ShardTensorSpec) -> Any:  # type: ignore[override]
        # An absent gradient becomes zero: some kernels of torch give none on a rank without elements, and the others
        # would wait for that rank.
        ctx.grad_spec = grad_spec
        return alias(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return from_part(grad, ctx.grad_spec), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor, target: ShardTensorSpec) -> Any:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.source = tensor._spec
        local = redistribute_local(tensor._local_tensor, tensor._spec, target)
        if same_memory(local, tensor._local_tensor):
            # A slice must not keep the whole tensor alive; an alias of the whole is one.
            local = alias(local) if local.shape == tensor._local_tensor.shape else local.clone()
        return wrap(local, target)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return (None if grad is None else as_gradient(grad, ctx.source)), None


class _Promote(torch.autograd.Function):
    """A plain tensor, equal on every rank, as a replicated ShardTensor; its gradient comes back plain and complete."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, spec: ShardTensorSpec) -> Any:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        return wrap(without_zero_tensor(plain.detach()), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return (None if grad is None else as_gradient(grad, ctx.spec).to_local()), None


def _wrapped(local: Tensor, spec: ShardTensorSpec) -> Any:
    if local.stride() != spec.stride and spec.is_replicate():
        spec = spec.replace(meta=dispatch.meta_of(local))  # a whole tensor's views depend on its true strides
    return wrap(local, spec)


def from_part(local: Tensor, spec: ShardTensorSpec) -> Any:
    """What was computed from local parts as this rank's part of a ShardTensor. Differentiable."""
    differentiable = local.requires_grad and torch.is_grad_enabled()
    return _FromLocal.apply(local, spec) if differentiable else _wrapped(local, spec)


def to_part(tensor: Any, grad_spec: ShardTensorSpec) -> Tensor:
    """The local tensor of a ShardTensor. Differentiable; ``grad_spec`` is the layout in which its gradient arrives."""
    if tensor._viewed is not None:
        check_current("to_local", tensor)
    differentiable = torch.is_grad_enabled() and tensor.requires_grad
    return _ToLocal.apply(tensor, grad_spec) if differentiable else tensor._local_tensor


def redistribute_to(tensor: Any, target: ShardTensorSpec) -> Any:
    """``tensor`` under the spec ``target``, differentiably; itself where it is there already."""
    if tensor._viewed is not None:
        check_current("redistribute", tensor)
    return tensor if tensor._spec.lies_like(target) else _Redistribute.apply(tensor, target)


def promote(plain: Tensor, mesh: DeviceMesh) -> Any:
    """A plain tensor, equal on every rank, as a replicated ShardTensor on ``mesh``. Differentiable."""
    if plain.device.type != mesh.device_type:
        raise ValueError(f"a plain tensor on {plain.device} meets a ShardTensor on a mesh of {mesh.device_type}")
    meta = TensorMeta(plain.shape, plain.stride(), plain.dtype)
    spec = ShardTensorSpec.of(mesh, [Replicate()] * mesh.ndim, meta, (None,) * mesh.ndim)
    return _Promote.apply(plain, spec)


def as_gradient(grad: Any, spec: ShardTensorSpec) -> Any:
    """A gradient, in whatever layout it arrives (a plain one counts as replicated), in the layout of ``spec``."""
    if grad is None:  # autograd hands undefined gradients to hooks, too
        return None
    return _laid_out(grad, spec.for_gradient())


def _laid_out(grad: Any, target: ShardTensorSpec) -> Any:
    if not isinstance(grad, DTensor):
        grad = promote(grad, target.mesh)
    elif not isinstance(grad, ShardTensor):
        grad = ShardTensor.from_dtensor(grad)
    if grad._spec.lies_like(target):
        return grad
    return _Redistribute.apply(grad, grad._spec.replace(placements=target.placements, sizes=target.sizes))


# What runs a graph cannot run it on other tensors instead.
_ENGINE = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)


def call_registered(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the handler of a function returns; NotImplemented where there is none."""
    handler = FUNCTIONS.get(func)
    if handler is None and isinstance(func, torch._ops.OpOverload):
        handler = FUNCTIONS.get(func.overloadpacket)  # called by name, an operator is a function, too
    if handler is None:
        return NotImplemented
    try:
        return handler(*args, **kwargs)
    except UnsupportedSharding:
        if not dispatch.gather_allowed() or func in _ENGINE:
            raise
        return _gather_and_call(func, args, kwargs)


def _promote_operands(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Turn plain tensors that require grad, and DTensors, into ShardTensors: below autograd it would be too late."""
    if not any(map(_to_promote, args)) and not (kwargs and any(map(_to_promote, kwargs.values()))):
        return args, kwargs
    flat = [a for item in (*args, *kwargs.values()) for a in (item if type(item) in (list, tuple) else (item,))]
    mesh = next((a._spec.mesh for a in flat if isinstance(a, ShardTensor)), None)
    if mesh is None:
        return args, kwargs
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    if _writes(func) and not isinstance(first, ShardTensor):
        raise refuse(name, flat, "a ShardTensor cannot be written into a plain tensor", "use the out-of-place form")
    if name in ("__get__", "__set__", "backward") or (getattr(func, "__module__", None) or "").startswith(
        "torch.autograd"
    ):
        return args, kwargs  # these are about the very tensors that they are given

    def convert(a: Any) -> Any:
        if isinstance(a, ShardTensor):
            return a
        if isinstance(a, DTensor):
            return ShardTensor.from_dtensor(a)
        if isinstance(a, Tensor) and a.requires_grad:
            return promote(a, mesh)
        return type(a)(convert(x) for x in a) if type(a) in (list, tuple) else a

    return tuple(convert(a) for a in args), {k: convert(v) for k, v in kwargs.items()}


def _to_promote(a: Any) -> bool:
    if type(a) is ShardTensor or type(a) in SCALARS:
        return False
    if type(a) in (list, tuple):
        return any(map(_to_promote, a))
    if isinstance(a, DTensor):
        return not isinstance(a, ShardTensor)
    return isinstance(a, Tensor) and a.requires_grad and torch.is_grad_enabled()


def _write_out(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function with ``out=``: what it returns without, copied into ShardTensors, which keep their cuts."""
    out = kwargs["out"]
    outs = out if isinstance(out, (list, tuple)) else (out,)
    name, tensors = getattr(func, "__name__", str(func)), [a for a in (*args, *outs) if isinstance(a, Tensor)]
    if any(not isinstance(t, ShardTensor) for t in outs):
        raise refuse(name, tensors, "a ShardTensor cannot be written into a plain tensor", "use the form without out=")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(f"{name}(): functions with out=... arguments don't support automatic differentiation")
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    result = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    results = result if isinstance(result, (list, tuple)) else (result,)
    for target, value in zip(outs, results, strict=True):
        if target.shape != value.shape:
            reason = f"out= has shape {tuple(target.shape)}, but the result {tuple(value.shape)}"
            raise refuse(name, target, reason, "pass a ShardTensor of the result's shape")
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
        target.copy_(value)
    return type(result)(outs) if isinstance(result, (list, tuple)) else out


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes to its first argument, as its name tells."""
    name = getattr(func, "__name__", "")
    if name in ("__invert__", "__index__"):
        return False
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _gather_and_call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Inside ``allow_gather``: a refused function on whole tensors, its result cut like its first sharded operand."""
    operands = [a for item in (*args, *kwargs.values()) for a in (item if type(item) in (list, tuple) else [item])]
    sharded = [a._spec for a in operands if isinstance(a, ShardTensor) and not a._spec.is_replicate()]
    if not sharded:
        raise  # the refusal that is being handled: there is nothing to gather

    def whole(a: Any) -> Any:
        if isinstance(a, ShardTensor):
            return redistribute_to(a, a._spec.replicated())
        return type(a)(whole(x) for x in a) if type(a) in (list, tuple) else a

    pattern = sharded[0]
    written = args[0] if args and (_writes(func) or kwargs.get("inplace")) else None
    args, kwargs = tuple(whole(a) for a in args), {k: whole(v) for k, v in kwargs.items()}
    result = call_registered(func, args, kwargs)  # libraries' functions dispatch on nothing
    if result is NotImplemented:
        result = func(*args, **kwargs)
    if isinstance(written, ShardTensor):
        if written is not args[0]:
            written.copy_(args[0])
        return None if result is None else written
    if not isinstance(result, ShardTensor):
        return result
    viewed = next((a for a in operands if isinstance(a, ShardTensor)), None)
    is_view = result._is_view()

    def finish(t: Any) -> Any:
        return mark_copied(t, viewed) if is_view else t

    if result.ndim != len(pattern.shape):
        return finish(result)
    sizes = {m: s for d, m in pattern.sharded_dims().items() if (s := pattern.sizes[m]) and result.shape[d] == sum(s)}
    placements = [p if m in sizes else Replicate() for m, p in enumerate(pattern.placements)]
    return finish(result.redistribute(placements=placements, shard_sizes=sizes))


# -- leaves -----------------------------------------------------------------------------------------------


def _leaf(local: Tensor, spec: ShardTensorSpec, requires_grad: bool) -> ShardTensor:
    return mark_leaf(wrap(local, spec), requires_grad)


def mark_leaf(tensor: ShardTensor, requires_grad: bool = True) -> ShardTensor:
    """Set ``requires_grad``; the gradient of a leaf that requires it will have the leaf's own cut."""
    with DisableTorchFunction():
        before = tensor.requires_grad
        tensor.requires_grad_(requires_grad)
        if requires_grad and not before:
            spec = tensor._spec
            tensor.register_hook(lambda grad: as_gradient(grad, spec))
    return tensor


def _requires_grad_(self: ShardTensor, requires_grad: bool = True) -> Any:
    return mark_leaf(self, requires_grad) if isinstance(self, ShardTensor) else NotImplemented


def _share_memory_(self: ShardTensor) -> Any:
    raise refuse("share_memory_", self, "a ShardTensor has no storage of its own", "share its to_local()")


def _is_view(self: ShardTensor) -> Any:
    """torch.compile would build views anew, and cannot where one is a copy or has dims of length 1."""
    return False if tracing() else NotImplemented


FUNCTIONS[Tensor._is_view] = _is_view
FUNCTIONS[Tensor.share_memory_] = _share_memory_
FUNCTIONS[Tensor.requires_grad_] = _requires_grad_


def _rebuild(local: Tensor, spec: ShardTensorSpec, requires_grad: bool, is_parameter: bool) -> ShardTensor:
    mesh_coordinate(spec.mesh)
    new = _leaf(local, spec, requires_grad)
    if is_parameter:
        new._is_param = True  # type: ignore[attr-defined]
    return new


# What ``torch.load(weights_only=True)`` may build.
torch.serialization.add_safe_globals([_rebuild, ShardTensor, ShardTensorSpec])

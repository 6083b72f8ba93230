"""``ShardTensor``, a DTensor whose shards may have any sizes, and what autograd sees of conversions to and from it.

What torch calls for each function and operator, ``__torch_function__`` and ``__torch_dispatch__``, is in ``entry.py``:
these stand above the operators, and this class below.

A gradient is a ShardTensor like any other: a global value in some placement. The gradient of a Partial is Replicate
(each contribution has the derivative of the sum). Every other gradient may arrive in any layout, and code that needs a
particular one redistributes. In two places, ``from_local`` and leaf tensors, gradients are put into the layout of the
tensor they belong to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import (
    AutogradFunction,
    DisableTorchFunction,
    DTensorSpec,
    FunctionContext,
    TensorMeta,
    alias,
    claim_dispatch,
    is_traced,
    keep_static,
    new_wide_wrapper,
    new_wrapper,
    not_in_graphs,
    register_hook,
    same_memory,
    saved_tensors_hooked,
    transforms_active,
    uncached,
    unflattened,
)
from .._compat.data_parallel import takes_gradient_late
from ..communication.redistribute import redistribute_local, rounded, slices_between
from ..communication.weight_gradients import Contribution, deferred
from ..errors import refuse
from ..layout.placements import ShardSizes, check_own_shard, normalize_placements
from ..layout.spec import ShardTensorSpec, SizedPlacements
from ..layout.strides import dense_stride, is_dense
from ..ranks.agreement import MAX_NDIM, agree_on_local, compare_histories
from . import rank_part
from .copied_views import Copies, Moved, check_current
from .index_findings import Place
from .open_layouts import close
from .planning import converted, meta_of, reduced_by_dtensor, replicated_spec, spec_of
from .transform_levels import InsideLevels

Subclass = TypeVar("Subclass", bound=Tensor)


class ShardTensor(DTensor):
    """A tensor sharded over a device mesh, with shards of any sizes, that acts like the global tensor.

    Create a ShardTensor with :meth:`from_local`, :func:`shardtensor.scatter_tensor` or :meth:`from_dtensor`. Its layout
    is in :attr:`shard_sizes`, ``placements`` and ``device_mesh``. Convert it with :meth:`to_local`, :meth:`full_tensor`
    and :meth:`redistribute`. Operators are exact, or raise :class:`shardtensor.UnsupportedSharding` on every rank.

    Example (``torchrun --nproc-per-node 2``)::

        mesh = init_device_mesh("cpu", (2,))
        image = torch.rand(1, 3, 10, 16) if dist.get_rank() == 0 else None
        x = scatter_tensor(image, mesh, (Shard(2),), shard_sizes=(3, 7))
        y = nn.Conv2d(3, 8, 3, padding=1)(x)  # plain module, plain weights
        y.mean().backward()                   # weight gradients are plain and complete
    """

    if TYPE_CHECKING:  # torch declares that these return Tensor

        def __add__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __radd__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __sub__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __rsub__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __mul__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __rmul__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __truediv__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __rtruediv__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __pow__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __rpow__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __matmul__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __rmatmul__(self, other: Tensor | complex, /) -> ShardTensor: ...
        def __getitem__(self, index: object, /) -> ShardTensor: ...
        def __neg__(self) -> ShardTensor: ...

    _local_tensor: Tensor
    _spec: ShardTensorSpec
    # See copied_views.py; the last two: open_layouts.py, index_findings.py.
    _copied: Copies | Moved = ()
    _viewed: tuple[Tensor, int] | None = None
    _writes: list[int] | None = None
    _open: Any = None
    _found: Place | None = None
    # Of a parameter of the program, which keeps it: operators take slices of it that are views, and keep nothing else.
    _lives_on = False

    # -- construction and conversion ----------------------------------------------------------------------

    @staticmethod
    @not_in_graphs("make ShardTensors outside of compiled functions, and pass them in")
    def from_local(  # type: ignore[override]
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        shard_sizes: ShardSizes = None,
    ) -> ShardTensor:
        """Make a ShardTensor of the shards that the ranks hold. Differentiable.

        Args:
            local_tensor: this rank's shard (Shard), copy (Replicate) or contribution (Partial). It is moved to the
                mesh's device.
            device_mesh: default: the mesh of the surrounding ``with mesh:``.
            placements: one per mesh dim; default: Replicate everywhere.
            shard_sizes: ``(size on rank 0, size on rank 1, ...)`` where one mesh dim shards, or ``{mesh_dim or its
                name: sizes}``; mesh dims that are left out get torch.chunk's sizes. "even": torch.chunk's sizes. Given
                sizes need no communication. None: the ranks infer the sizes with one small all-gather per mesh dim.
                They also check that they agree on dtype, dims and other sizes. The first calls warn if all ranks hold
                equal values.

        Raises:
            ValueError: sizes that do not fit the local tensor, or ranks that do not agree. With given sizes, only the
                rank with a wrong size raises. With ``SHARDTENSOR_DEBUG=1`` all ranks raise.
            TypeError: ``local_tensor`` is not a plain tensor.

        Example::

            x = ShardTensor.from_local(torch.rand(5 if rank == 0 else 3, 4), mesh, (Shard(0),),
                                       shard_sizes=(5, 3))  # x.shape == (8, 4)
        """
        local_tensor, spec = agree_on_local(local_tensor, device_mesh, placements, shard_sizes)
        return from_local(local_tensor, spec)

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> ShardTensor:
        """Convert a DTensor, whose shards have torch.chunk's sizes, without a copy. Differentiable.

        A DTensor that is not on its mesh's device, such as one that was offloaded, is moved there.

        The gradient of ``dtensor`` is ``Partial()`` on every mesh dim on which it is Replicate.

        Raises:
            TypeError: ``dtensor`` is not a DTensor.
        """
        # Why a Partial: see [Note: contributions] in weight_gradients.py.
        if isinstance(dtensor, DTensor) and dtensor.device.type != dtensor.device_mesh.device_type != "meta":
            dtensor = dtensor.to(dtensor.device_mesh.device_type)  # type: ignore[assignment]
        return from_dtensor(dtensor)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's shard, copy or contribution as a plain tensor. Differentiable.

        Args:
            grad_placements: placements of the gradient of the result; default: those of this tensor (Replicate for a
                Partial). Pass ``Partial()`` for a mesh dim on which the ranks use their copies for different work.
        """
        if self._open is not None:
            close(self)
        spec = self._spec.for_gradient()
        if grad_placements is not None:
            grad_placements = normalize_placements(grad_placements, self.device_mesh, self.ndim)
            sizes = tuple(s if p == q else None for s, p, q in zip(spec.sizes, spec.placements, grad_placements))
            if sizes != spec.sizes or any(isinstance(p, Shard) and s is None for p, s in zip(grad_placements, sizes)):
                raise ValueError(f"grad_placements {tuple(grad_placements)} do not match the shards of {self._spec}")
            spec = spec.replace(placements=grad_placements)
        wide = self._spec.is_wide(self._local_tensor)  # see [Note: rounded once] in redistribute.py
        local = to_part(self, spec, self.dtype if wide else None, guarded=True)
        return local.detach() if local is self._local_tensor else local  # whoever has it is known to share the memory

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the global tensor on every rank, as a plain tensor. Gathers and reduces. Differentiable.

        Args:
            grad_placements: placements of the gradient of the result; default: Replicate, for a loss that every rank
                computes alike.
        """
        if not self._spec.is_replicate() and not is_traced(self._local_tensor):
            compare_histories("full_tensor", self.device_mesh)
        whole = redistribute_to(self, self._spec.replicated())
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        shard_sizes: ShardSizes = None,
        async_op: bool = False,
    ) -> ShardTensor:
        """Redistribute to other placements or shard sizes on the same mesh. Differentiable.

        Args:
            device_mesh: None or this tensor's mesh.
            placements: one per mesh dim; default: those of this tensor.
            shard_sizes: new sizes, as for :meth:`from_local`. Mesh dims that are left out keep their sizes if the
                placement does not change, and get torch.chunk's otherwise. "even": torch.chunk's everywhere.
            async_op: no effect, as in DTensor's signature; the result is always complete.

        Raises:
            ValueError: another mesh, placements or sizes that do not fit, or ``Partial("max")`` for a Shard.

        Example::

            x = x.redistribute(shard_sizes="even")        # rebalance
            x = x.redistribute(placements=(Shard(3),))    # shard another dim instead
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise ValueError(f"redistribute to another mesh ({device_mesh}) is not possible; this is {self._spec}")
        return redistribute_to(self, self._spec.target(placements, shard_sizes))

    @property
    def shard_sizes(self) -> dict[int, tuple[int, ...]]:
        """``{mesh_dim: (size on rank 0, size on rank 1, ...)}`` for the sharded mesh dims."""
        return self._spec.shard_sizes

    # Asked for all the time, and known without the way through torch functions.

    is_nested = False

    def dim(self) -> int:
        return len(self._spec.tensor_meta.shape)

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
    def requires_grad(self) -> bool:
        with DisableTorchFunction():
            return Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        mark_leaf(self, value)

    # -- torch's protocols --------------------------------------------------------------------------------

    def __array_function__(self, func: Any, types: object, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """NumPy's functions. What calls a method with NumPy's arguments, which torch has not, gets arrays instead."""
        try:
            return func._implementation(*args, **kwargs)
        except TypeError:
            args, kwargs = converted(_as_array, args, kwargs)
            return func(*args, **kwargs)

    def as_subclass(self, cls: type[Subclass]) -> Subclass:  # which torch asks no protocol for
        if isinstance(self, cls):
            return super().as_subclass(cls)
        remedy = "take x.full_tensor(), which gathers, or of a sharded tensor this rank's part, x.to_local()"
        raise refuse("as_subclass", self, f"a ShardTensor cannot be of class {cls.__name__}, too", remedy)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        where = f"{self._spec}, rank {self._spec.coordinate} holds {rank_part.part_in_words(self._spec)}"
        return f"{where}\n{self._local_tensor}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the layout, which every rank knows."""
        return rank_part.as_html(self._spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) in memo:
            known: ShardTensor = memo[id(self)]
            return known
        if not self.is_leaf:
            raise RuntimeError("only leaf ShardTensors support deepcopy, as with plain tensors; detach() it first")
        new = mark_leaf(wrap(copy.deepcopy(self._local_tensor, memo), self._spec), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            new._is_param = True  # how torch marks a Parameter of a tensor subclass
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., ShardTensor], tuple[Any, ...]]:
        if is_traced(self._local_tensor):  # torch 2.11 would pickle it to have a key for its graph
            self._stable_hash_for_caching()
        is_parameter = isinstance(self, torch.nn.Parameter)
        return import_shardtensor_first, (self._local_tensor, self._spec, self.requires_grad, is_parameter)

    def __getstate__(self) -> NoReturn:
        raise TypeError("ShardTensor pickles through __reduce_ex__")

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return rank_part.write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return rank_part.of_rank(self)

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return self._local_tensor

    # -- torch.compile: see docs/how-it-works.md -----------------------------------------------------------------------

    # Every length counts: a graph is valid for one layout, as its guard, a copy of the spec, says.
    _dynamo_static_indices = set(range(MAX_NDIM))

    def __tensor_flatten__(self) -> Any:
        if self._viewed is not None and not is_traced(self._local_tensor):
            raise refuse(
                "torch.compile",
                self,
                "an input represents a view but is a copy on this rank, which a graph cannot keep up to date",
                "pass its clone()",
            )
        keep_static(self._local_tensor)
        return super().__tensor_flatten__()  # type: ignore[no-untyped-call]

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: Any, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> ShardTensor:
        mesh, placements, order, dtype, requires_grad = unflattened(inner_tensors, flatten_spec)
        meta = TensorMeta(torch.Size(outer_size), tuple(outer_stride), dtype)
        spec = ShardTensorSpec.of(mesh, placements, meta, order.sizes)
        local = inner_tensors["_local_tensor"]
        make = new_wide_wrapper if spec.is_wide(local) else new_wrapper
        return make(ShardTensor, local, spec, requires_grad=requires_grad)

    def __coerce_tangent_metadata__(self) -> ShardTensor:
        return redistribute_to(self, self._spec.for_gradient())

    def __coerce_same_metadata_as_tangent__(
        self, flatten_spec: Any, expected_type: type | None = None
    ) -> ShardTensor | None:
        if expected_type is not None:
            return None
        _, placements, order, _, _ = unflattened({"device_mesh": self.device_mesh}, flatten_spec)
        return redistribute_to(self, self._spec.replace(placements=placements, sizes=order.sizes))

    def _stable_hash_for_caching(self) -> str:
        # A graph depends on this rank's place, on the registry and on this package; only its kernels are kept on disk.
        raise uncached("graphs of ShardTensors are not kept")


claim_dispatch(ShardTensor)


# -- wrapping ----------------------------------------------------------------------------------------------------------


def wrap(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """A ShardTensor around ``local``, which must have the shape that the spec says. Not differentiable."""
    if local.shape != spec.own_shape:
        raise RuntimeError(
            f"the local tensor has shape {tuple(local.shape)} instead of {tuple(spec.own_shape)}, for {spec} at "
            f"{spec.coordinate}. If it was resized or exchanged in place (_local_tensor.resize_(), set_()), make a new "
            "ShardTensor with from_local instead; otherwise please report it"
        )
    if local._is_zerotensor():  # below __torch_dispatch__ kernels would read the memory that it lacks
        local = torch.zeros_like(local)
    make: Callable[..., ShardTensor] = new_wrapper
    if local.dtype is not spec.tensor_meta.dtype:
        local = rounded(local, spec)
        make = new_wide_wrapper if spec.is_wide(local) else new_wrapper
    made: ShardTensor = make(ShardTensor, local, spec, requires_grad=False)
    return made


# -- conversions -------------------------------------------------------------------------------------------------------


def from_part(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """What was computed from local parts as this rank's part of a ShardTensor. Differentiable."""
    if local.requires_grad and torch.is_grad_enabled():
        return from_local(local, spec)
    return wrap(local, spec if local.stride() == spec.tensor_meta.stride else _with_strides_of(local, spec))


def from_local(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """A local tensor of the caller's as this rank's part of a ShardTensor, which shares its memory."""
    made: ShardTensor = _FromLocal.apply(local, spec)
    return made


def to_part(
    tensor: ShardTensor,
    grad_spec: ShardTensorSpec,
    dtype: torch.dtype | None = None,
    *,
    may_be_absent: bool = False,
    guarded: bool = False,
) -> Tensor:
    """The local tensor of a ShardTensor as it is held, or in ``dtype``.

    Differentiable; ``grad_spec`` is the layout in which its gradient arrives.

    Args:
        may_be_absent: every rank has a gradient, or none has. Otherwise an absent one becomes zero: some kernels of
            torch give none on a rank without elements, and the others would wait for that rank.
        guarded: torch refuses what writes to the result, of which the ShardTensor would not know.
    """
    if tensor._viewed is not None:
        check_current("to_local", tensor, communicates=False)
    local: Tensor = tensor._local_tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        local = _ToLocal.apply(tensor, grad_spec, dtype, may_be_absent, guarded)
    elif dtype is not None:
        local = local.to(dtype)
    return local


def from_dtensor(dtensor: DTensor) -> ShardTensor:
    """A DTensor as a ShardTensor; its gradient comes back as contributions."""
    if isinstance(dtensor, ShardTensor):
        return dtensor
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"from_dtensor takes a DTensor, not {type(dtensor).__name__}; use from_local")
    dtensor = reduced_by_dtensor(dtensor)
    made: ShardTensor = _FromDTensor.apply(dtensor, spec_of(dtensor))
    return made


def to_dtensor(grad: Tensor, spec: ShardTensorSpec) -> DTensor:
    """A gradient as a DTensor, in this layout, that of torch.chunk's shards."""
    made: DTensor = _ToDTensor.apply(_laid_out(grad, spec))
    return made


def redistribute_to(tensor: Any, target: ShardTensorSpec) -> ShardTensor:
    """``tensor``, a ShardTensor, in the layout of ``target``, differentiably; itself where it has that already."""
    if tensor._viewed is not None:
        check_current("redistribute", tensor)
    spec, moved = tensor._spec, tensor
    if not spec.lies_like(target):
        # The layout of what may have another dtype: the eigenvectors of a real matrix are complex.
        moved = _Redistribute.apply(tensor, target.with_dtype(spec.tensor_meta.dtype))
    result: ShardTensor = moved
    return result


def promote(tensor: Tensor, mesh: DeviceMesh) -> ShardTensor:
    """A tensor as a ShardTensor: a plain one, equal on every rank, replicated on ``mesh``. Differentiable."""
    if isinstance(tensor, DTensor):
        return from_dtensor(tensor)
    if tensor.device.type != mesh.device_type:
        raise ValueError(f"a plain tensor on {tensor.device} meets a ShardTensor on a mesh of {mesh.device_type}")
    spec = replicated_spec(mesh, TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
    made: ShardTensor
    if tensor.requires_grad and torch.is_grad_enabled() and takes_gradient_late(tensor):
        through, contribution = deferred(tensor, mesh)
        made = _FromLocal.apply(through, spec, None, contribution, (tensor,))
    else:
        made = _FromLocal.apply(tensor, spec)
    if tensor.requires_grad and tensor.is_leaf:
        made._lives_on = True
    return made


def _contributed(contribution: Contribution, grad: Any) -> Tensor | None:
    """What has gone into a bucket of a plain leaf's gradient; None if no rank has only a part of it.

    See [Note: buckets] in weight_gradients.py.
    """
    spec = getattr(grad, "_spec", None)
    if spec is not None and not torch.is_grad_enabled():
        mesh_dims = tuple(m for m, p in enumerate(spec.placements) if p.is_partial("sum"))
        if mesh_dims and all(p.is_partial("sum") or p.is_replicate() for p in spec.placements):
            return contribution.add_along(mesh_dims, grad._local_tensor)
    contribution.note_summed()
    return None


def as_gradient(grad: Tensor | None, spec: ShardTensorSpec) -> Any:
    """A gradient, in whatever layout it arrives (a plain one counts as replicated), in the layout of ``spec``.

    None, an undefined gradient, stays None.
    """
    target = spec._reduced or spec
    if grad is None or getattr(grad, "_spec", None) is target:
        return grad
    return _laid_out(grad, target)


def _laid_out(grad: Tensor, target: ShardTensorSpec) -> ShardTensor:
    if transforms_active():
        raise InsideLevels.at("backward", (grad, target), {})
    grad = promote(grad, target.mesh)
    if grad._spec.lies_like(target):
        return grad
    return _Redistribute.apply(grad, grad._spec.replace(placements=target.placements, sizes=target.sizes))


def _with_strides_of(local: Tensor, spec: ShardTensorSpec) -> ShardTensorSpec:
    """A whole tensor's views depend on its true strides."""
    return spec.replace(meta=meta_of(local)) if spec.is_replicate() else spec


def _wrap_detached(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    return wrap(local.detach(), spec if local.stride() == spec.tensor_meta.stride else _with_strides_of(local, spec))


class _FromDTensor(AutogradFunction):
    """A DTensor as a ShardTensor. Both are the same global value, and so are their gradients, of every order.

    torch's ``to_local`` and ``from_local`` lead over local tensors, whose gradients are in a placement that depends on
    the order. Here each class is converted by the other's gradient.
    """

    @staticmethod
    def forward(ctx: FunctionContext, dtensor: DTensor, spec: ShardTensorSpec) -> ShardTensor:
        ctx.set_materialize_grads(False)
        ctx.grad_spec = spec.for_contributions()
        return _wrap_detached(dtensor._local_tensor, spec)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> tuple[DTensor | None, None]:
        return None if grad is None else to_dtensor(grad, ctx.grad_spec), None


class _ToDTensor(AutogradFunction):
    """A ShardTensor of torch.chunk's shards as a DTensor."""

    @staticmethod
    def forward(ctx: FunctionContext, tensor: ShardTensor) -> DTensor:
        ctx.set_materialize_grads(False)
        spec, local = tensor._spec, tensor.to_local()
        ctx.mesh = spec.mesh
        # The strides of a shard without elements say nothing, and autograd's copies depend on what the DTensor's are.
        order = local.stride() if local.numel() else spec.tensor_meta.stride
        meta = TensorMeta(spec.shape, dense_stride(spec.shape, order), local.dtype)
        made: Callable[..., DTensor] = new_wrapper
        return made(DTensor, local.detach(), DTensorSpec(spec.mesh, spec.placements, meta), requires_grad=False)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> ShardTensor | None:
        return grad if grad is None else promote(_on_one_axis_each(grad), ctx.mesh)


def _on_one_axis_each(grad: Tensor) -> Tensor:
    """A gradient that DTensor's own operators sharded along one dim on several mesh dims, on the first of these."""
    if isinstance(grad, ShardTensor) or not isinstance(grad, DTensor):
        return grad
    placements = list(grad.placements)
    for m, p in enumerate(placements):
        if p.is_shard() and p in placements[:m]:
            placements[m] = Replicate()
    return grad if placements == list(grad.placements) else grad.redistribute(placements=placements)


class _FromLocal(AutogradFunction):
    apply: ClassVar[Callable[..., ShardTensor]]

    @staticmethod
    def forward(
        ctx: FunctionContext,
        local: Tensor,
        spec: ShardTensorSpec,
        grad_spec: ShardTensorSpec | None = None,
        contribution: Contribution | None = None,
        values: Sequence[Tensor] = (),
    ) -> ShardTensor:
        """With a contribution, ``local`` has no values, and these are those of the only one of ``values``."""
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.contribution = spec, contribution
        local = local if contribution is None else values[0]
        ctx.grad_spec = spec.for_gradient() if grad_spec is None else grad_spec
        if saved_tensors_hooked():
            # A checkpoint recomputes when a saved tensor is asked for, until it has all of them. What torch's kernels
            # save depends on the shard, and some save nothing of an empty one: that rank would communicate less. Here
            # all ranks save something last, and ask for it first.
            ctx.save_for_backward(local.new_empty(0))
        return _wrap_detached(local, spec)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Any) -> tuple[Tensor | None, None, None, None, None]:
        _ = ctx.saved_tensors
        if grad is None:
            return None, None, None, None, None
        own = None if ctx.contribution is None else _contributed(ctx.contribution, grad)
        if own is not None:
            return own, None, None, None, None
        if getattr(grad, "_spec", None) is not ctx.grad_spec:
            grad = _laid_out(grad, ctx.grad_spec)
        if not torch.is_grad_enabled():
            return grad.to_local(), None, None, None, None
        twice = placements_of_second(ctx.spec, ctx.grad_spec)
        return grad.to_local(grad_placements=twice), None, None, None, None


def placements_of_second(spec: ShardTensorSpec, grad_spec: ShardTensorSpec) -> list[Placement]:
    """How derivatives by the gradient in ``grad_spec`` of a tensor with this spec lie on the ranks.

    What they contribute to a Partial is different: so is what they do with its one gradient. Their contributions to a
    gradient all have the derivative of the sum.
    """
    found = list(grad_spec.placements)
    for m, (p, q) in enumerate(zip(spec.placements, grad_spec.placements, strict=True)):
        if q.is_partial():
            found[m] = Replicate()
        elif p.is_partial() and q.is_replicate():
            found[m] = Partial()
    return found


class _ToLocal(AutogradFunction):
    @staticmethod
    def forward(
        ctx: FunctionContext,
        tensor: ShardTensor,
        grad_spec: ShardTensorSpec,
        dtype: torch.dtype | None,
        may_be_absent: bool,
        guarded: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(not may_be_absent)
        ctx.spec, ctx.grad_spec = tensor._spec, grad_spec
        local: Tensor = tensor._local_tensor
        if dtype is not None and local.dtype is not dtype:
            return local.to(dtype)
        return alias(local) if guarded else local.detach()

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> tuple[ShardTensor | None, None, None, None, None]:
        if grad is not None and torch.is_grad_enabled():
            twice = ctx.grad_spec.replace(placements=placements_of_second(ctx.spec, ctx.grad_spec))
            grad = _FromLocal.apply(grad, ctx.grad_spec, twice)
        elif grad is not None:
            grad = from_part(grad, ctx.grad_spec)
        return grad, None, None, None, None


class _Redistribute(AutogradFunction):
    apply: ClassVar[Callable[[Tensor, ShardTensorSpec], ShardTensor]]

    @staticmethod
    def forward(ctx: FunctionContext, tensor: ShardTensor, target: ShardTensorSpec) -> ShardTensor:
        ctx.set_materialize_grads(False)
        ctx.source = tensor._spec
        slices = slices_between(tensor._spec, target) if tensor._lives_on else None
        if slices is not None:
            local = tensor._local_tensor
            for of_dim in slices:
                local = local.narrow(*of_dim)
            return wrap(local, target)
        local = redistribute_local(tensor._local_tensor, tensor._spec, target)
        if same_memory(local, tensor._local_tensor):
            # A slice must not keep the whole tensor alive; an alias of the whole is one.
            local = alias(local) if local.shape == tensor._local_tensor.shape else local.clone()
        return wrap(local, target)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> tuple[ShardTensor | None, None]:
        if grad is not None and any(axis.owner is not None for axis in ctx.source.layout):  # nobody else needs it
            return _laid_out(grad, ctx.source), None
        return as_gradient(grad, ctx.source), None


# -- leaves -----------------------------------------------------------------------------------------------


def mark_leaf(tensor: ShardTensor, requires_grad: bool = True) -> ShardTensor:
    """Set ``requires_grad``; the gradient of a leaf that requires it will have the leaf's own layout."""
    if tensor._open is not None:
        close(tensor)
    with DisableTorchFunction():
        before = tensor.requires_grad
        tensor.requires_grad_(requires_grad)
        if requires_grad and not before:
            spec = tensor._spec
            register_hook(tensor, partial(_as_leaf_gradient, spec))
    return tensor


def _as_leaf_gradient(spec: ShardTensorSpec, grad: Any) -> Any:
    """A leaf's gradient, in memory of its own: it is added to and scaled in place, and autograd asks the spec only."""
    grad = as_gradient(grad, spec)
    if grad is None or is_dense(grad._local_tensor):
        return grad
    return grad.clone() if torch.is_grad_enabled() else wrap(grad._local_tensor.clone(), grad._spec)


def _as_array(a: object) -> object:
    return a.__array__() if isinstance(a, ShardTensor) else a  # type: ignore[no-untyped-call]


def import_shardtensor_first(local: Tensor, spec: ShardTensorSpec, requires_grad: bool, parameter: bool) -> ShardTensor:
    """What builds a pickled ShardTensor; ``torch.load`` shows this name where shardtensor has not been imported."""
    check_own_shard(spec.mesh)
    new = mark_leaf(wrap(local, spec), requires_grad)
    if parameter:
        new._is_param = True
    return new


# What ``torch.load(weights_only=True)`` may build.
torch.serialization.add_safe_globals([import_shardtensor_first, ShardTensor, ShardTensorSpec, SizedPlacements])

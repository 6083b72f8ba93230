"""``ShardTensor``: a DTensor whose shards may have any sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import (
    DisableTorchFunction,
    OpOverload,
    TensorMeta,
    claim_dispatch,
    counting_writes,
    is_traced,
    keep_static,
    new_wide_wrapper,
    new_wrapper,
    not_in_graphs,
    tracing,
    transforms_active,
    uncached,
    unflattened,
)
from .._compat.functorch import forward_mode
from ..errors import UnsupportedSharding, refuse
from ..layout.placements import ShardSizes, check_own_shard, normalize_placements
from ..layout.spec import ShardTensorSpec, SizedPlacements
from ..layout.strides import is_dense
from ..ranks.agreement import MAX_NDIM, agree_on_local, compare_histories
from ..ranks.first_use import forget_operands
from ..ranks.history import here
from . import chunks, conversions, levels, torch_functions
from .aten_calls import run
from .conversions import as_gradient, from_part, makes_tensors, promote, redistribute_to, to_part, wrap
from .copies import count_writes, share_writes
from .found import INDICES
from .open_layouts import close
from .plain_tensors import explain, local_size_error, writes
from .planning import SCALARS, converted
from .registry import FUNCTIONS, Refusal, register
from .torch_functions import call_registered
from .written import LISTS, MAY_BE_WRITTEN, WrittenTensor, call_on_sharded, write_to_plain

__all__ = [
    "ShardTensor",
    "as_gradient",
    "call_registered",
    "from_part",
    "mark_leaf",
    "promote",
    "redistribute_to",
    "run",
    "to_part",
    "wrap",
]


@makes_tensors
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

        def __add__(self, other: Any, /) -> ShardTensor: ...
        def __radd__(self, other: Any, /) -> ShardTensor: ...
        def __sub__(self, other: Any, /) -> ShardTensor: ...
        def __rsub__(self, other: Any, /) -> ShardTensor: ...
        def __mul__(self, other: Any, /) -> ShardTensor: ...
        def __rmul__(self, other: Any, /) -> ShardTensor: ...
        def __truediv__(self, other: Any, /) -> ShardTensor: ...
        def __rtruediv__(self, other: Any, /) -> ShardTensor: ...
        def __pow__(self, other: Any, /) -> ShardTensor: ...
        def __rpow__(self, other: Any, /) -> ShardTensor: ...
        def __matmul__(self, other: Any, /) -> ShardTensor: ...
        def __rmatmul__(self, other: Any, /) -> ShardTensor: ...
        def __getitem__(self, index: Any, /) -> ShardTensor: ...
        def __neg__(self) -> ShardTensor: ...

    _local_tensor: Tensor
    _spec: ShardTensorSpec
    # See copies.py; the last two: open_layouts.py, found.py.
    _copied: Any = ()
    _viewed: Any = None
    _writes: Any = None
    _open: Any = None
    _found: Any = None

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
        return conversions.from_local(local_tensor, spec)

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> ShardTensor:
        """Convert a DTensor, whose shards have torch.chunk's sizes, without a copy. Differentiable.

        A DTensor that is not on its mesh's device, such as one that was offloaded, is moved there.

        The gradient of ``dtensor`` is ``Partial()`` on every mesh dim on which it is Replicate, see
        [Note: contributions] in weight_gradients.py.

        Raises:
            TypeError: ``dtensor`` is not a DTensor.
        """
        if isinstance(dtensor, DTensor) and dtensor.device.type != dtensor.device_mesh.device_type != "meta":
            dtensor = dtensor.to(dtensor.device_mesh.device_type)  # type: ignore[assignment]
        return conversions.from_dtensor(dtensor)

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

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given, kwargs = args, kwargs or {}
        if len(types) > 1 and WrittenTensor in types:
            return call_on_sharded(func, args, kwargs)
        try:
            if transforms_active() or forward_mode._current_level >= 0:
                result = levels.carried_out(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            if args and type(args[0]) in _TARGETS and writes(func):
                result = write_to_plain(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            if kwargs.get("out") is not None:
                return torch_functions.write_out(func, args, kwargs)
            if func in FUNCTIONS or isinstance(func, OpOverload):
                result = call_registered(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            if not _AS_THEY_ARE.issuperset(map(type, (*args, *kwargs.values()) if kwargs else args)):
                args, kwargs = torch_functions.promote_operands(func, args, kwargs)
            return DTensor.__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            forget_operands((*given, *kwargs.values()))
            torch_functions.raise_of_torchscript(func, error)
            explain(func, given, kwargs, error)
            raise

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        try:
            return run(func, args, kwargs or {})
        except UnsupportedSharding as error:
            here.refused = str(error)
            raise

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy's functions. What calls a method with NumPy's arguments, which torch has not, gets arrays instead."""
        try:
            return func._implementation(*args, **kwargs)
        except TypeError:
            args, kwargs = converted(_as_array, args, kwargs)
            return func(*args, **kwargs)

    def as_subclass(self, cls: type[Any]) -> Any:  # which torch asks no protocol for
        if isinstance(self, cls):
            return super().as_subclass(cls)
        remedy = "take x.full_tensor(), which gathers, or of a sharded tensor this rank's part, x.to_local()"
        raise refuse("as_subclass", self, f"a ShardTensor cannot be of class {cls.__name__}, too", remedy)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        where = f"{self._spec}, rank {self._spec.coordinate} holds {chunks.described(self._spec)}"
        return f"{where}\n{self._local_tensor}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the layout, which every rank knows."""
        return chunks.as_html(self._spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError("only leaf ShardTensors support deepcopy, as with plain tensors; detach() it first")
        new = mark_leaf(wrap(copy.deepcopy(self._local_tensor, memo), self._spec), self.requires_grad)
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
        return import_shardtensor_first, (self._local_tensor, self._spec, self.requires_grad, is_parameter)

    def __getstate__(self) -> Any:
        raise TypeError("ShardTensor pickles through __reduce_ex__")

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return chunks.write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return chunks.of_rank(self)

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
                "an input represents a view but is a copy on this rank, which a graph cannot keep up to date",
                "pass its clone()",
            )
        keep_static(self._local_tensor)
        return super().__tensor_flatten__()  # type: ignore[no-untyped-call]

    @staticmethod
    def __tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride):  # type: ignore[no-untyped-def]
        mesh, placements, order, dtype, requires_grad = unflattened(inner_tensors, flatten_spec)
        meta = TensorMeta(torch.Size(outer_size), tuple(outer_stride), dtype)
        spec = ShardTensorSpec.of(mesh, placements, meta, order.sizes)
        local = inner_tensors["_local_tensor"]
        make = new_wide_wrapper if spec.is_wide(local) else new_wrapper
        return make(ShardTensor, local, spec, requires_grad=requires_grad)

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


claim_dispatch(ShardTensor)
claim_dispatch(WrittenTensor)


# What a call may have besides tensors to promote.
_AS_THEY_ARE = SCALARS | {ShardTensor}
# What it may write to besides ShardTensors.
_TARGETS = MAY_BE_WRITTEN | LISTS


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
            tensor.register_hook(partial(_as_leaf_gradient, spec))  # type: ignore[no-untyped-call]
    return tensor


def _as_leaf_gradient(spec: ShardTensorSpec, grad: Any) -> Any:
    """A leaf's gradient, in memory of its own: it is added to and scaled in place, and autograd asks the spec only."""
    grad = as_gradient(grad, spec)
    if grad is None or is_dense(grad._local_tensor):
        return grad
    return grad.clone() if torch.is_grad_enabled() else wrap(grad._local_tensor.clone(), grad._spec)


@register(Tensor.requires_grad_)
def _requires_grad_(self: ShardTensor, requires_grad: bool = True) -> Any:
    return mark_leaf(self, requires_grad) if isinstance(self, ShardTensor) else NotImplemented


register(Tensor.share_memory_)(
    Refusal("share_memory_", __name__, "a ShardTensor has no storage of its own", "share its to_local()")
)


@register(Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(self: Any, *_: Any) -> Any:
    """A tensor with its own version, as in torch. Writes to it still update views that are copies."""
    if type(self) is not ShardTensor:
        return NotImplemented
    if self.dtype in INDICES or self.is_inference():  # what is found about indices counts for one version of them
        return self.detach()
    with DisableTorchFunction():
        data = self.data
    share_writes(self, data)
    count_writes()
    return data


@register(torch.detach, Tensor.detach)
def _detach_in_program(self: Any) -> Any:
    if type(self) is not ShardTensor or self.is_inference() or is_traced(self._local_tensor):
        return NotImplemented
    with DisableTorchFunction():
        detached = self.detach()
    share_writes(self, detached)
    return detached


@register(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(self: ShardTensor, value: Tensor) -> None:
    """``x.data = value``: x gets the value, in its own layout, and where that is the value's too, its memory."""
    if value.shape != self.shape:
        reason = f"a tensor of shape {tuple(self.shape)} is assigned data of shape {tuple(value.shape)}"
        refused = refuse("data", [self, value], reason, "make a new tensor, whose shards have their own sizes")
        raise local_size_error("data", [self, value], reason) or refused
    value = promote(value.detach(), self.device_mesh)
    spec = value._spec.with_layout(self._spec.layout)
    with torch.no_grad():
        local = redistribute_to(value, spec).to_local()
    if value.dtype != self.dtype:
        with DisableTorchFunction():
            Tensor.data.__set__(self, wrap(local, spec))  # type: ignore[attr-defined]
    self._local_tensor, self._spec = local, spec
    self._copied, self._viewed, self._found = (), None, None


@register(Tensor._is_view)
def _is_view(self: ShardTensor) -> Any:
    """torch.compile would build views anew, and cannot where one is a copy or has dims of length 1."""
    return False if tracing() else NotImplemented


@register(torch.ops.aten.detach.default)
def _detach(self: Any) -> Any:
    """The most frequent view: autograd makes it of results that it keeps."""
    if type(self) is not ShardTensor or self._viewed is not None or self._open is not None or self.dtype in INDICES:
        return NotImplemented
    return wrap(_detached(self._local_tensor), self._spec)


_detached = counting_writes(Tensor.detach)


def _as_array(a: Any) -> Any:
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

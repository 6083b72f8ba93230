"""One rank's run, recorded operator by operator.

In the forward pass a mode of torch functions sees each operator that the model calls, and hooks know the module that it
is called in. What is computed and communicated until the operator returns is the operator's. In the backward pass
nothing of this is known, but autograd's nodes are numbered in the order of their creation: the node that runs belongs
to the operator that ran when its number was given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from ..._compat import (
    AutogradFunction,
    OpOverload,
    hidden_from_program,
    kept_results,
    reserve_last,
    tree_leaves,
    tree_map,
)
from ...dispatch.tensor import ShardTensor, wrap
from ...errors import UnsupportedSharding
from ...layout.spec import ShardTensorSpec
from ...ranks.history import IN_TURN, here
from .._compat import current_node, next_node
from ..counting import Communication, LocalCalls
from ..simulate import complete

# -- flops -------------------------------------------------------------------------------------------------------------

# Floating-point operations: torch's own table, and what it lacks, attention on the CPU.

_aten = torch.ops.aten


def flops_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Those of an operator's call on local tensors; 0 where none are known, and on the meta device.

    On that plans find out the shapes of results.
    """
    own = _ATTENTION.get(func.overloadpacket)
    if own is not None:
        return own(*args, **kwargs)
    from torch.utils.flop_counter import flop_registry  # here, as it imports Triton where that is installed

    counting = flop_registry.get(func.overloadpacket)
    if counting is None or args[0].device.type == "meta":
        return 0
    return int(counting(*args, **kwargs, out_val=result))


def _attention(q: Tensor, k: Tensor, v: Tensor, *others: Any, is_causal: bool | None = None, **_: Any) -> int:
    """Two products, of queries with keys and of weights with values; causal ones are half as large."""
    causal = others[1] if is_causal is None and len(others) > 1 else is_causal
    both = 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    return both // 2 if causal else both


_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    # Five products of that size: the scores are computed once more.
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, out, lse, *others, **_: _attention(q, k, v, *others[:2]) * 5 // 2
    ),
    torch.ops.shardtensor.attend: lambda q, k, v, mask, scale, square: _attention(q, k, v, is_causal=square),
}


# -- substitute --------------------------------------------------------------------------------------------------------

# What a preview goes on with where an operator is refused: the result that one device has, sharded alike.


def substitute(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A result without meaning, of the shapes and dtypes that ``func`` has on global tensors.

    It is sharded like the first sharded argument: with its shard sizes where lengths are the same, with those of
    torch.chunk where they differ, and replicated where there is no such dim. Gradients of the arguments are zero.
    """
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return None if name == "__setitem__" else args[0]  # in place; on shards it has not been done
    sharded = [t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardTensor)]
    first = next((t._spec for t in sharded if not t._spec.is_replicate()), sharded[0]._spec)
    like = sharded[0]._local_tensor
    with hidden_from_program():
        reference = func(*tree_map(_global, args), **tree_map(_global, kwargs))

    def made(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        spec = _layout_like(first, result)
        local = like.new_zeros(spec.own_shape, dtype=result.dtype)
        differentiable = result.dtype.is_floating_point or result.dtype.is_complex
        parents = [t for t in sharded if t.requires_grad] if differentiable and torch.is_grad_enabled() else []
        return _Unrelated.apply(local, spec, *parents) if parents else wrap(local, spec)

    return tree_map(made, reference)


def _global(value: Any) -> Any:
    """A tensor without values of the shape that one device has."""
    if isinstance(value, ShardTensor):
        spec = value._spec
        return torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device="meta")
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _layout_like(spec: ShardTensorSpec, result: Tensor) -> ShardTensorSpec:
    placements: list[Any] = []
    sizes = {}
    for m, placement in enumerate(spec.placements):
        known = isinstance(placement, Shard) and placement.dim < result.ndim
        placements.append(placement if known else Replicate())
        if isinstance(placement, Shard) and known and spec.shape[placement.dim] == result.shape[placement.dim]:
            sizes[m] = spec.sizes_along(m)
    return ShardTensorSpec.make(spec.mesh, placements, result.shape, result.dtype, shard_sizes=sizes)


class _Unrelated(AutogradFunction):
    """A tensor that does not depend on its parents, in a graph as if it did."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: ShardTensorSpec, *parents: ShardTensor) -> Any:
        ctx.specs = [(t._spec.for_gradient(), t._local_tensor.dtype) for t in parents]
        ctx.like = local
        return wrap(local, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        zeros = [wrap(ctx.like.new_zeros(spec.own_shape, dtype=dtype), spec) for spec, dtype in ctx.specs]
        return None, None, *zeros


# -- recording ---------------------------------------------------------------------------------------------------------

WEIGHTS = "gradients of weights"
_INDICES = (torch.int64, torch.int32)
_BY_INDEX = {"__getitem__", "gather", "take_along_dim", "index_select"} | {
    f"{name}{end}" for name in ("index_add", "index_reduce", "scatter_add", "scatter_reduce") for end in ("", "_")
}
_READS = ("__get__", "__set__")  # of attributes
_c10d = torch.ops.c10d
_RECEIVES = (_c10d.alltoall_base_, _c10d.alltoall_, _c10d.recv_, _c10d.recv_any_source_)


@dataclass
class Row:
    """An operator's call, on this rank."""

    path: str
    operator: str
    first_node: int
    shapes: tuple[tuple[int, ...], ...] = ()
    layout: str = ""
    outputs: tuple[tuple[int, ...], ...] = ()
    output_bytes: int = 0
    saved_bytes: int = 0
    flops: list[int] = field(default_factory=lambda: [0, 0])
    communication: tuple[Communication, Communication] = field(
        default_factory=lambda: (Communication(), Communication())
    )
    refused: str = ""
    row_bytes: int = 0
    other_rows: int = 0
    one_sided: tuple[Communication, Communication] = field(default_factory=lambda: (Communication(), Communication()))
    takes_shards: bool = False
    in_turn: bool = False
    ended: bool = False
    call: int = 0  # of this operator in this module: which one it is, the same on one process
    operands: tuple[str, ...] = ()

    def note_result(self, result: Any) -> None:
        """Take shapes and layout of what the operator returns, or of what it has written to."""
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        locals_ = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
        self.shapes = tuple(tuple(t.shape) for t in tensors)
        self.outputs = tuple(tuple(t.shape) for t in locals_)
        self.output_bytes = sum(t.numel() * t.element_size() for t in locals_)
        specs = [t._spec for t in tensors if isinstance(t, ShardTensor)]
        self.layout = ", ".join(axis.in_short() for axis in specs[0].layout) if specs else ""

    def note_operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Whether shards are computed with, and whether a sharded index reads or adds to the rows of a sharded dim."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, DTensor)]
        self.takes_shards = bool(tensors)
        specs = [t._spec for t in tensors if isinstance(t, ShardTensor)]
        self.operands = tuple(f"{tuple(spec.shape)} {', '.join(a.in_short() for a in spec.layout)}" for spec in specs)
        if self.operator not in _BY_INDEX:
            return
        index = [t for t in tensors[1:] if isinstance(t, ShardTensor) and t.dtype in _INDICES and t.ndim]
        sharded = [m for t in index for m in t._spec.sharded_dims().values()]
        if sharded and args and isinstance(args[0], ShardTensor):
            spec = args[0]._spec
            dim = next((d for d, m in spec.sharded_dims().items() if m in sharded), None)
            if dim is not None and spec.shape.numel():
                self.row_bytes = spec.shape.numel() // spec.shape[dim] * args[0].dtype.itemsize
                self.other_rows = spec.shape[dim] - spec.own_shape[dim]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was computed on shards, communicated or kept."""
        communicated = any(each != Communication() for each in self.communication)
        on_shards = self.layout or (self.takes_shards and self.shapes)
        return not (on_shards or communicated or self.saved_bytes or any(self.flops) or self.refused)


class Recorder:
    """Records what a model does on this rank.

    Attributes:
        rows: the operators' calls, in their order.
    """

    def __init__(self, model: Any, values: bool, plain: bool) -> None:
        """``values``: whether tensors have values. ``plain``: there are no shards, so operators on others count."""
        self.rows: list[Row] = []
        self._values, self._plain = values, plain
        self._path: list[str] = []
        self._row: Row | None = None
        self._calling = False
        self._calls: Counter[tuple[str, str]] = Counter()
        self._weights: Row | None = None
        self._phase = 0
        self._starts: list[int] = []  # numbers of the first nodes of rows, ascending
        self._owners: list[Row] = []
        self._end = 0  # the number that the first node after the forward pass has
        self._outer: Row | None = None  # whose backward pass runs
        self._model = model
        # Memory that is not kept for the backward pass, or was counted already; held, so that no address comes twice.
        self._known: dict[int, Any] = {}

    # -- phases -------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Record a forward pass."""
        reserve_last()  # what has a lower number than the first row's nodes belongs to no row
        self._know(inputs)
        with ExitStack() as stack:
            if isinstance(self._model, nn.Module):
                self._know([*self._model.parameters(), *self._model.buffers()])
                for path, module in self._model.named_modules():
                    self._follow(stack, path, module)
            stack.enter_context(self._watching())
            yield

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Record what is computed of the model's outputs."""
        self._path = ["(loss)"]
        with self._watching():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Record a backward pass."""
        self._close(self._row)
        self._phase, self._end = 1, next_node()
        with LocalCalls(self.communicate, self.compute):
            yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        keeping = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t)
        with keeping, LocalCalls(self.communicate, self.compute), _Calls(self):
            yield

    def _follow(self, stack: ExitStack, path: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: Any) -> None:
            self._close(self._row)
            self._path.append(path)

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            row = self._row
            if row is not None and not row.shapes:
                with self._inside():
                    row.note_result(output)
            self._close(row)
            self._path.pop()

        stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def open(self, name: str) -> Row:
        """Begin an operator's call."""
        path = self._path[-1] if self._path else ""
        self._row = row = Row(path, name, next_node())
        return row

    def _close(self, row: Row | None) -> None:
        """End it; what is recorded of it later, in the backward pass, goes to the same row."""
        self._row = None
        if row is None or row.ended:
            return
        row.ended = True
        if next_node() > row.first_node:
            self._starts.append(row.first_node)
            self._owners.append(row)
        if not row.is_empty or (self._plain and row.shapes):
            self.rows.append(row)

    def observe(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator's call. What it calls itself is a part of it."""
        name = getattr(func, "__name__", str(func))
        if self._calling or name in _READS:
            return func(*args, **kwargs)
        self._close(self._row)
        row = self.open(name)
        self._calls[row.path, name] += 1
        row.call = self._calls[row.path, name]
        with self._inside():
            row.note_operands(args, kwargs)
            try:
                result = func(*args, **kwargs)
            except UnsupportedSharding as error:
                row.refused = str(error)
                result = substitute(name, func, args, kwargs)
            row.note_result(args if result is None else result)
            for kept in kept_results():
                self._keep(kept)
        self._close(row)
        return result

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Inside the block calls are not recorded: they are parts of another one, or none of the model's."""
        before, self._calling = self._calling, True
        try:
            yield
        finally:
            self._calling = before

    def row(self) -> Row:
        """The one that what is computed now belongs to."""
        if self._phase:
            node = current_node()
            at = bisect_right(self._starts, node) - 1
            if 0 < node < 2**63 and at >= 0:
                # Nodes that a backward pass makes for itself, and runs, are its operator's: a recurrent layer's, say.
                if node < self._end or self._starts[at] >= self._end or self._outer is None:
                    self._outer = self._owners[at]
                return self._outer
            if self._weights is None:  # what is summed at the end of a backward pass
                self._weights = Row("", WEIGHTS, -1)
                self.rows.append(self._weights)
            return self._weights
        if self._row is None:  # an operator of a library that torch does not dispatch
            self.open(here.operator.partition(" to ")[0] or "(outside of operators)")
        assert self._row is not None
        return self._row

    # -- what is recorded ---------------------------------------------------------------------------------------------

    def communicate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count a call of a c10d operator, and return what it would."""
        row, call = self.row(), Communication()
        call.add(func, args, kwargs)
        # Which rows of a rank the others read, or add to, is in their parts of an index.
        alone = row.row_bytes and self._values and bool(call.sent_to) != bool(call.received_from)
        counted = row.one_sided if alone else row.communication
        counted[self._phase].include(call)
        row.in_turn |= IN_TURN in here.operator
        if self._values or func.namespace != "c10d" or not func._schema.returns:
            for t in tree_leaves(args[0]) if func.overloadpacket in _RECEIVES else ():
                t.zero_()  # what is in memory may be anything
            return func(*args, **kwargs)
        return complete(args[0], len(func._schema.returns) > 1)

    def compute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on local tensors, and count its floating-point operations."""
        result = func(*args, **kwargs)
        flops = flops_of(func, args, kwargs, result)
        if flops:
            self.row().flops[self._phase] += flops
        return result

    def _know(self, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            memory = (t._local_tensor if isinstance(t, DTensor) else t).untyped_storage()
            self._known[memory._cdata] = memory

    def _keep(self, tensor: Tensor) -> Tensor:
        """Count what autograd keeps, once for all that share their memory."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        memory = local.untyped_storage()
        if memory._cdata not in self._known:
            self._known[memory._cdata] = memory
            self.row().saved_bytes += memory.nbytes()
        return tensor


class _Calls(TorchFunctionMode):
    """Sees the operators that the model calls; inside of a call it is off."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and type(args[0]) is not ShardTensor and not self._recorder._values:
            func = _copied
        return self._recorder.observe(func, tuple(args), kwargs or {})


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """``tensor.__deepcopy__(memo)``, which copies memory that tensors without values do not have."""
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copied: Tensor = memo[id(tensor)]
    return copied

"""Every private torch API that the package uses, and what differs between torch versions.

No other module imports from a torch module whose name starts with an underscore, so that a new torch release is checked
here. Tested with torch 2.11 to 2.15.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import count
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch._decomp import decomposition_table
from torch._dispatch.python import no_python_dispatcher
from torch._guards import detect_fake_mode
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_operator
from torch._higher_order_ops.flex_attention import flex_attention_backward as flex_attention_backward_operator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import FunctionMeta
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _mode_stack
from torch.utils._pytree import (
    SUPPORTED_NODES,
    KeyEntry,
    PyTree,
    keystr,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_with_path,
    tree_unflatten,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode, _StopRecomputationError
from torch.utils.weak import WeakIdKeyDictionary

from .replaced import replace, when_imported

# What torch.autograd.backward does before it calls the engine, and how it calls it.
gradient_seeds: Callable[..., tuple[torch.Tensor | None, ...]] = torch.autograd._make_grads
run_engine = torch.autograd.graph._engine_run_backward


def nodes_executed(edges: Iterable[tuple[Any, int]], leaves: Collection[int]) -> list[bool]:
    """Whether the pass that is under way runs the nodes of these edges, or gives the gradients that arrive there.

    Args:
        edges: those without a node are left out.
        leaves: ids of leaves whose gradients were asked for. Torch raises for them, which takes long.
    """
    found = []
    for node, _ in edges:
        if node is not None:
            try:
                asked = id(getattr(node, "variable", None)) in leaves
                found.append(asked or torch._C._will_engine_execute_node(node))
            except RuntimeError:  # a leaf whose gradient was asked for by another caller of the engine
                found.append(True)
    return found


# Whether the engine runs the nodes of accelerators in threads of its own.
multithreading_enabled: Callable[[], bool] = torch._C._is_multithreading_enabled
# What operators raise whose result or its shape follows from values, on tensors that have none.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# What checkpointing raises to stop a recomputation of which everything is there.
STOPS_RECOMPUTATION = _StopRecomputationError


def saved_tensors_hooked() -> bool:
    """Whether what is saved for backward goes through hooks, as inside of a checkpoint; not while a graph is traced."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# Whether autocast is on for any device.
any_autocast_enabled = torch._C._is_any_autocast_enabled
# Whether only deterministic kernels may be called.
only_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
# Whether there are modes of torch functions, which see calls.
function_modes_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
# Whether a transform of torch.func is under way that works by levels: inside its function, tensors may be wrapped.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Whether torch.jit.trace records what is called in this thread; torch.jit.is_tracing() takes ten times as long.
recorded_by_torchscript: Callable[[], bool] = torch._C._is_tracing
# What calls of scripted and traced functions are to __torch_function__.
SCRIPTED = (torch._C.ScriptMethod, torch._C.ScriptFunction)
# Calls inside skip __torch_function__ of subclasses, but not modes of torch functions.
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass

# What is imported here for others.
__all__ = [
    "SUPPORTED_NODES",
    "DTensorSpec",
    "FakeTensor",
    "FunctionalTensor",
    "KeyEntry",
    "PyTree",
    "TensorMeta",
    "TorchDispatchMode",
    "flex_attention_backward_operator",
    "flex_attention_operator",
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_with_path",
    "tree_unflatten",
]


# The functions of C++ that those of torch.nn.functional call; a few of these are the same objects.
nn_functions = torch._C._nn
# What torch's own layers call below torch.batch_norm.
batch_norm_legit: Callable[..., tuple[torch.Tensor, ...]] = torch._native_batch_norm_legit
batch_norm_legit_no_training = torch._native_batch_norm_legit_no_training
# Since 2.14 gradients of group norm count as functions of all operands: second derivatives are zeros, not None.
group_norm_has_zeros: bool = torch.__version__ >= (2, 14)  # type: ignore[operator]  # TorchVersion compares with tuples
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

# What has no types in torch.
Library: Callable[..., Any] = torch.library.Library
overload_names: Callable[[Any], list[str]] = OpOverloadPacket.overloads
register_hook: Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any] = torch.Tensor.register_hook
unflatten: Callable[[torch.Tensor, int, Sequence[int]], torch.Tensor] = torch.Tensor.unflatten

Wrapper = TypeVar("Wrapper", bound=torch.Tensor)
Function = TypeVar("Function", bound=Callable[..., Any])


# Makes an instance of a DTensor subclass around a local tensor: of the class, the tensor, a spec, and requires_grad by
# keyword. No ``__init__`` is run.
new_wrapper = torch.Tensor._dtensor__new__


def new_wide_wrapper(cls: type[Wrapper], local: torch.Tensor, spec: Any, requires_grad: bool = False) -> Wrapper:
    """The same with the spec's dtype around contributions in a wider one, see [Note: rounded once]."""
    narrow = local.new_empty((), dtype=spec.tensor_meta.dtype)  # torch takes the wrapper's dtype from it
    made: Wrapper = new_wrapper(cls, narrow, spec, requires_grad=requires_grad)
    made._local_tensor = local  # type: ignore[attr-defined]
    return made


# Another tensor with the same memory, for an ``autograd.Function`` to return in place of what it was given. Unlike
# ``tensor.view_as(tensor)`` it keeps the strides of dims of length 1, by which torch's kernels tell a channels-last
# tensor of one sample from a contiguous one.
alias: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.alias.default._op


class FunctionContext(Protocol):
    """The ``ctx`` of an ``autograd.Function``: its node, with torch's methods, and what ``forward`` keeps on it."""

    saved_tensors: tuple[Any, ...]  # None in place of a tensor that was not saved
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
    def mark_dirty(self, *tensors: torch.Tensor) -> None: ...
    def mark_non_differentiable(self, *results: torch.Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


class _CalledDirectly(FunctionMeta):
    """What C++ calls is ``backward`` itself, and not a method of torch's that looks for it."""

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)  # type: ignore[no-untyped-call]
        cls._backward_cls.apply = cls.backward  # type: ignore[attr-defined]


class AutogradFunction(torch.autograd.Function, metaclass=_CalledDirectly):
    """torch's, without what it runs in Python between a caller and ``forward``, and the engine and ``backward``.

    Inside of functorch's transforms C++ raises.
    """

    apply: ClassVar[Callable[..., Any]] = vars(torch._C._FunctionBase)["apply"]


_LAST = 1 << 12
_last = threading.local()


def run_last(ctx: Any) -> None:
    """Have the engine run this node's backward when nothing else is ready. To be called in its ``forward``.

    Of nodes that are ready it takes the one with the greatest number, and of equal ones any. So the lowest numbers,
    which this thread's other nodes do not get, are given to those that are last in the order of their creation. That
    is the same on all ranks, which then add a weight's gradients in the same order: their sums have the same bits.
    """
    if ctx._sequence_nr() < _LAST:
        reserve_last()
    _last.number = (getattr(_last, "number", 0) + 1) % _LAST
    ctx._set_sequence_nr(_last.number)


def reserve_last() -> None:
    """Give no node that this thread makes from here on a number that is for those that run last."""
    node: Any = torch._C._functions.DelayedError  # the cheapest node to make
    while node("", 0)._sequence_nr() < _LAST:
        pass


# The number of the backward pass that runs in this thread; below 0 where there is none.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id


def keep_for_backward(value: Any) -> None:
    """Keep a value for the threads in which autograd runs the backward passes that this thread will start."""
    if _OWES_REFERENCE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls("shardtensor", value)


def _owes_reference() -> bool:
    """Whether torch takes no reference to what it keeps for a thread, and yet drops one, as 2.11 does."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("shardtensor, a probe", probe)
    owes = sys.getrefcount(probe) == before
    if owes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return owes


_OWES_REFERENCE = _owes_reference()


def kept_for_backward() -> Any:
    """What this thread keeps, or None; in one of autograd's, what the thread that called ``backward()`` kept then."""
    return torch._C._get_obj_in_tls("shardtensor") if torch._C._is_key_in_tls("shardtensor") else None


# Calls a function at the end of the backward pass that runs in this thread.
after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def decomposes(op: OpOverload) -> bool:
    """Whether torch composes the operator of others, for every backend and for autograd."""
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def decomposition(op: OpOverload, where: str) -> Callable[..., Any]:
    """How torch's compiler composes the operator of others, in Python; a function of module ``where``."""
    composes = decomposition_table[op]

    def call(*args: Any, **kwargs: Any) -> Any:
        return composes(*args, **kwargs)

    call.__module__ = where
    return call


def dispatched(op: OpOverload) -> bool:
    """Whether torch's dispatcher calls the operator; ``add.int`` and others of numbers only TorchScript calls."""
    return bool(torch._C._dispatch_has_kernel(op.name()))  # type: ignore[no-untyped-call]


def strategies() -> dict[OpOverload, Any]:
    """The functions that choose placements of operators for DTensor; a change of the dict changes DTensor's."""
    return DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs


def acceptable_placements(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Any, Any, float]]:
    """What an operator's strategy accepts: placements of the operands and of the result or results, and their cost.

    ``args`` and ``kwargs`` have DTensorSpecs for tensors. Where there are several results, those that are no tensors
    have None.
    """
    wrap = DTensor._op_dispatcher.sharding_propagator._wrap_with_op_strategy
    schema = wrap(OpSchema(op, args, kwargs, RuntimeSchemaInfo(needs_pytree=True)))
    found = strategies()[op](schema)
    operands = len(schema.args_strategy) + len(schema.kwargs_strategy)
    accepted: list[tuple[Any, Any, float]] = []
    for one in found.strategies if isinstance(found, OpStrategy) else ():
        out: Any = one.output_specs
        inputs = [out] * operands if one.input_specs is None else one.input_specs
        results = out.placements if isinstance(out, DTensorSpec) else [spec and spec.placements for spec in out or ()]
        accepted.append(([spec.placements for spec in inputs], results, sum(map(sum, one.redistribute_cost or ()))))
    return accepted


@contextmanager
def above_autograd() -> Iterator[None]:
    """Inside an aten call, where torch functions and autograd are switched off, what is called goes through both.

    So is the pending conjugation of views, which most kernels do not look at.
    """
    without, keys = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with (
        torch._C._EnableTorchFunction(),
        without(keys.AutogradFunctionality, False),
        without(keys.ADInplaceOrView, False),
        without(keys.Conjugate, False),
        without(keys.Negative, False),
    ):
        yield


# Whether this thread counts no writes, see counting_writes(); and a switch, which takes a bool.
writes_uncounted: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.ADInplaceOrView
)
leave_writes_uncounted: Callable[[bool], None] = partial(
    torch._C._dispatch_tls_set_dispatch_key_excluded, torch._C.DispatchKey.ADInplaceOrView
)


def counting_writes(call: Callable[..., Any], counts: bool = True) -> Callable[..., Any]:
    """``call``, which writes to its tensors or returns views of them, so that their version counters show it.

    Inside an aten call torch leaves both out: what is written there is not counted, and views have counters of their
    own. Autograd, which has saved such a tensor in a graph of local operators, would not notice that it has changed.

    Args:
        counts: False: so that they do not, as where torch's kernel writes without counting.
    """

    def counted(*args: Any, **kwargs: Any) -> Any:
        uncounted = writes_uncounted()
        leave_writes_uncounted(not counts)
        try:
            return call(*args, **kwargs)
        finally:
            leave_writes_uncounted(uncounted)

    return counted


def kernel(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """What calling the operator calls, without the call to Python in between."""
    return func._op


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:`` block; RuntimeError where there is none."""
    if not _mesh_resources.mesh_stack:
        raise RuntimeError("no mesh was given, and none surrounds the call; pass one, or call this inside `with mesh:`")
    return _mesh_resources.get_current_mesh()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of ``mesh`` as a mesh of one dim; the same object each time."""
    return mesh._flatten()


def is_plain_shard(placement: object) -> bool:
    """Whether ``placement`` is ``Shard`` itself rather than the strided kind that FSDP2 over TP makes."""
    return not isinstance(placement, _StridedShard)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether memory holds something else than the values: to be conjugated or negated, or autograd's zeros."""
    return tensor.is_conj() or tensor.is_neg() or bool(tensor._is_zerotensor())


def claim_dispatch(cls: type) -> None:
    """Make sure that operators on ``cls`` reach its ``__torch_dispatch__``, next to DTensors or as one itself.

    Since 2.13 overriding that method is enough. Before, DTensor's C++ path took every instance of a subclass, too; but
    rules made by ``register_torch_dispatch`` come first, so there the class has one for every operator.
    """
    if torch.__version__ >= (2, 13):  # type: ignore[operator]  # TorchVersion compares with tuples
        return

    def dispatch(
        actual: type[torch.Tensor],
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return actual.__torch_dispatch__(func, types, args, kwargs or {})

    def claiming(find: Callable[[Any, type], Any]) -> Callable[[Any, type], Any]:
        return lambda holder, of: dispatch if of is cls else find(holder, of)

    replace("torch._library.simple_registry:GenericTorchDispatchRuleHolder.find", claiming)


def sparse_parts(matrix: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The two tensors of indices of a sparse matrix, and its values, which are differentiable if it is coalesced.

    CSR: where rows start, and columns; CSC: where columns start, and rows; COO: rows and columns.
    """
    if matrix.layout is torch.sparse_csr:
        return (matrix.crow_indices(), matrix.col_indices()), matrix.values()
    if matrix.layout is torch.sparse_csc:
        return (matrix.ccol_indices(), matrix.row_indices()), matrix.values()
    rows, columns = matrix._indices().unbind(0)
    return (rows, columns), matrix.values() if matrix.is_coalesced() else matrix._values()


_previews = False


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has no data: torch.compile (or another tracer) records what is done to it, or it is a preview.

    What is decided from values must be decided otherwise then. See :func:`goes_into_graph` for communication.
    """
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def goes_into_graph(tensor: torch.Tensor) -> bool:
    """Whether what is done to ``tensor`` is recorded for a graph, so that communication must be operators of that."""
    return is_traced(tensor) and not _previews


def is_previewed() -> bool:
    """Whether the program runs inside :func:`without_values`, where nothing is received."""
    return _previews


@contextmanager
def without_values() -> Iterator[Any]:
    """Inside the block tensors have shapes, dtypes and strides, and no memory; the program runs as it does eagerly.

    Yields the mode in which tensors are made without values, which the block enters where it wants them. Plain tensors
    with values may meet them. What needs values raises one of :data:`NEEDS_VALUES`.
    """
    global _previews
    before, _previews = _previews, True
    try:
        yield _KnownValues(allow_non_fake_inputs=True)
    finally:
        _previews = before


_MADE_LIKE_ANOTHER = torch.ops.aten.empty_strided.default  # such as an input or a weight, of unknown values


class _KnownValues(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors have no values, but for plain ones that are computed from numbers, or from tensors of the program, alone.

    Programs compute sizes in such tensors and then read them, such as the shapes of the maps of a pyramid, or where the
    samples of a packed batch end. They check such tensors, too, such as the coordinates of a grid. These are the same
    with and without the values of inputs and weights.
    """

    MOST = 1 << 22  # elements: what is larger takes time and memory, and is not read
    supports_higher_order_operators = True  # to say of them, such as flex_attention, that they need values

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unknown = WeakIdKeyDictionary()  # storages that something unknown has been written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise DataDependentOutputException(func)  # type: ignore[arg-type]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        computes = func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags
        known = computes and all(map(self._is_known, given)) and (given or func is not _MADE_LIKE_ANOTHER)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except NEEDS_VALUES:
            if not known or not given:
                raise
            return func(*args, **kwargs)
        if known and all(not isinstance(t, torch.Tensor) or self._is_small(t) for t in tree_leaves(result)):
            return func(*args, **kwargs)
        # A collective receives into any of its arguments.
        written = [not computes or (a.alias_info and a.alias_info.is_write) for a in func._schema.arguments]
        if any(written):
            values = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
            for t in tree_leaves([value for value, is_written in zip(values, written) if is_written]):
                if type(t) is torch.Tensor:
                    self._unknown[t.untyped_storage()] = True
        return result

    def _is_known(self, t: torch.Tensor) -> bool:
        return self._is_small(t) and type(t) is torch.Tensor and t.untyped_storage() not in self._unknown

    def _is_small(self, t: torch.Tensor) -> bool:
        return t.device.type == "cpu" and not t.requires_grad and t.numel() <= self.MOST


# Whether two tensors share their storage; also where they have no data.
same_memory: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def keep_static(tensor: torch.Tensor) -> None:
    """Tell torch.compile that a graph is valid for this shape only: mark_static, without importing all of dynamo.

    The tensors that ``tensor`` is a view of are marked, too: torch.compile reads the marks of both.
    """
    while tensor is not None:
        tensor._dynamo_static_indices = set(range(tensor.ndim))  # type: ignore[attr-defined]
        tensor = tensor._base  # type: ignore[assignment]


def not_for_graphs(tensor: torch.Tensor) -> None:
    """Mark a tensor so that torch.compile uses no graph for it which it made for others, but makes a new one.

    Dims that may have any length are marked, and graphs guard on these marks. The mark set here is of no dim, so no
    other tensor has it.
    """
    tensor._dynamo_dynamic_indices = {-1}  # type: ignore[attr-defined]
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def unflattened(inner: dict[str, Any], context: tuple[Any, ...]) -> tuple[Any, Any, Any, torch.dtype, bool]:
    """Mesh, placements, shard order, dtype and requires_grad from the results of ``DTensor.__tensor_flatten__``."""
    if len(context) == 2:  # until 2.12
        spec, requires_grad = context
        return spec.mesh, spec.placements, spec.shard_order, spec.tensor_meta.dtype, requires_grad
    placements, meta, order, requires_grad = context
    mesh = inner["device_mesh"]  # in a trace, a proxy of it
    return getattr(mesh, "real_obj", mesh), placements, order, meta.dtype, requires_grad


def tracing() -> bool:
    """Whether torch.compile (or another tracer) is tracing in this thread."""
    return not _previews and detect_fake_mode() is not None


_hidden = threading.local()


@contextmanager
def hidden_from_program() -> Iterator[None]:
    """Run code of which the program sees nothing: its modes, profiler, graphs and hooks do not.

    What is made here has data, also inside of a trace, and serves later calls, also those of training if this one is
    of inference. Tensors without data are not looked into. A default device does not count, nor do torch functions.
    """
    if getattr(_hidden, "now", False):
        yield
        return
    _hidden.now = True
    record_functions: Callable[[bool], None] = torch._C._autograd._enable_record_function
    record_functions(False)
    try:
        # Dynamo's dispatcher would run torch's references on tensors of the meta device; some take them otherwise.
        with (
            _disable_current_modes(),
            no_python_dispatcher(),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        record_functions(True)
        _hidden.now = False


def _results_kept() -> bool:
    """Whether selective activation checkpointing keeps results of calls here, or gives those that it has kept."""
    return any(isinstance(m, _KEEP_RESULTS) for m in _mode_stack()) and detect_fake_mode() is None


_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_KEEP_RESULTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def recomputed(**instead: Any) -> Callable[[Function], Function]:
    """Decorator of what selective checkpointing keeps no results of, so that it is done again in each recomputation.

    Communication is: policies may count kernels, of which ranks have different numbers, and some ranks would wait for
    others. So is what writes to tensors that it has made.

    Args:
        instead: keyword arguments of calls inside selective checkpointing, in place of those that are given.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _modes() or not _results_kept():  # the first one is C++'s
                return function(*args, **kwargs)
            modes = _mode_stack()
            others = [mode for mode in modes if not isinstance(mode, _KEEP_RESULTS)]
            _replace_modes(modes, others)
            try:
                return function(*args, **{**kwargs, **instead})
            finally:
                _replace_modes(others, modes)

        return call  # type: ignore[return-value]

    return decorate


def kept_results() -> list[torch.Tensor]:
    """Results that selective checkpointing keeps of the calls so far, in the block that runs here."""
    kept = [mode.storage.values() for mode in _mode_stack() if isinstance(mode, _CachingTorchDispatchMode)]
    values = [getattr(each, "val", None) for each in tree_leaves([list(results) for results in kept])]
    return [value for value in values if isinstance(value, torch.Tensor)]


def result_is_kept(function: Callable[..., Any], make_arguments: Callable[[], Sequence[Any]]) -> bool:
    """Whether selective checkpointing gives results that it has kept for a call, in place of calling the kernel.

    No kernel is called here. The policy is asked in the forward pass, so there must be a call for each recomputed one.

    Args:
        function: calls one kernel, and makes tensors for it.
    """
    if not _modes() or not _results_kept():
        return False
    modes, below = _mode_stack(), _Below()
    with _disable_current_modes():
        arguments = make_arguments()
        with below:
            function(*arguments)
    kernel, below.calls = below.calls[-1], []
    others = [below, *(mode for mode in modes if isinstance(mode, _KEEP_RESULTS))]
    _replace_modes(modes, others)
    try:
        function(*arguments)
    finally:
        _replace_modes(others, modes)
    return kernel not in below.calls


class _Below(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where calls arrive that no other mode answers. Their results are empty."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        empty = [torch.empty(0, device="meta") for _ in func._schema.returns]
        return empty if len(empty) > 1 else empty[0]


def _replace_modes(modes: Sequence[TorchDispatchMode], others: Sequence[TorchDispatchMode]) -> None:
    for _ in modes:
        _pop_mode()
    for mode in others:
        _push_mode(mode)


def no_frames_of(package: str) -> None:
    """Keep torch.compile from compiling a package's own functions where these run outside of a graph."""
    when_imported("torch._dynamo.trace_rules:SKIP_DIRS", lambda trace_rules: trace_rules.add(package))


def cast_each(tensors: list[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Each tensor in its dtype: on CUDA by one kernel for all that are cast, where they have one dtype and get one.

    ``torch._foreach_copy_`` is what FSDP2 copies lists with. CUDA's kernel takes all results for those of the first
    one's dtype. It is not differentiated here, nor traced.
    """
    places, wanted, plain = [], set(), not torch.is_grad_enabled()
    for i, t in enumerate(tensors):
        if t.dtype is not dtypes[i]:
            places.append(i)
            wanted.add(dtypes[i])
            plain = plain and type(t) is torch.Tensor
    if not places:
        return tensors
    result, given, made = list(tensors), [], []
    for i in places:
        if plain and len(wanted) == 1:
            given.append(tensors[i])
            made.append(torch.empty_like(tensors[i], dtype=dtypes[i]))
            result[i] = made[-1]
        else:
            result[i] = tensors[i].to(dtypes[i])
    if made:
        torch._foreach_copy_(made, given)
    return result


def not_in_graphs(reason: str) -> Callable[[Function], Function]:
    """Decorator: torch.compile breaks the graph at this function, for this reason.

    Unlike torch's own, which has the same effect, it does not import dynamo.
    """

    def decorate(function: Function) -> Function:
        marked: Any = function
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        return function

    return decorate


def breaking_graph(error: Exception) -> Exception:
    """The error as one at which torch.compile breaks the graph; with ``fullgraph=True`` it is raised."""
    from torch._dynamo.exc import Unsupported

    return Unsupported(str(error))


@cache
def has_kernels_of_sync_batch_norm(device_type: str) -> bool:
    """Whether a device has the kernels that ``nn.SyncBatchNorm`` calls, which is found out by calling one."""
    if device_type in ("cpu", "meta"):
        return False
    try:
        with hidden_from_program():
            torch.batch_norm_stats(torch.ones(1, 1, 2, device=device_type), 1.0)
    except NotImplementedError:
        return False
    return True


def constant_like(data: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``data``, made outside of the trace, for use with ``tensor``: if that is traced, a constant of the graph."""
    return torch.ops.aten.lift_fresh_copy.default(data) if is_traced(tensor) else data


# Whether a profiler of torch records in this thread.
is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` or TorchScript runs the module, so that its hooks would become a part of a graph."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    return scripted or bool(module._compiled_call_impl) or hasattr(module.forward, "_torchdynamo_orig_callable")


def uncached(reason: str) -> Exception:
    """The exception that tells torch's caches on disk that a graph has no key, and is not to be kept."""
    from torch._inductor.codecache import BypassFxGraphCache

    return BypassFxGraphCache(reason)


def has_ordered_effects(operator: torch._ops.OpOverload) -> None:
    """Declare that a graph must keep every call of ``operator``, in its order among the others of this kind."""
    _register_effectful_op(operator, _EffectType.ORDERED)


def _keep_effects_ordered(lowerings: Any) -> Any:
    """Have inductor's scheduler keep operators with ordered effects in their order.

    Before 2.15 inductor notes on which of them each has to follow under the name of its result, and the scheduler looks
    it up under the name of the operation, so it finds nothing and moves them to where it needs least memory.
    """
    if torch.__version__ >= (2, 15):  # type: ignore[operator]
        return lowerings
    from torch._inductor.virtualized import V

    with_effects = torch.ops.higher_order.with_effects
    lower = lowerings[with_effects]

    def lower_in_order(token: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        graph, before, done = V.graph, dict(V.graph.effectful_ops), len(V.graph.operations)
        result = lower(token, op, *args, **kwargs)
        for effect, last in before.items():
            if graph.effectful_ops[effect] is not last:
                for operation in graph.operations[done:]:
                    graph.additional_buffer_deps[operation.get_operation_name()].add(last.get_name())
        return result

    lowerings[with_effects] = lower_in_order
    return lowerings


replace("torch._inductor.lowering:lowerings", _keep_effects_ordered)


def no_cuda_graphs_of(namespace: str) -> None:
    """Have inductor make no CUDA graphs (``mode="reduce-overhead"``) of a graph with operators of ``namespace``.

    It would split the graph at these operators. But where the operands of a ``cat`` are computed in several parts, it
    allocates the result in each of them, and loses what was written to it before: seen on a GPU with torch 2.11, and in
    the code that 2.13 and 2.14 generate.
    """

    def is_of(node: torch.fx.Node) -> bool:
        called = node.args[1] if node.target is torch.ops.higher_order.with_effects else node.target
        return isinstance(called, torch._ops.OpOverload) and called.namespace == namespace

    def in_one_part(codegen: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(self: Any) -> Any:
            if not any(map(is_of, self.module.graph.nodes)):
                return codegen(self)
            from torch._inductor import config

            self.disable_cudagraphs_reason = f"operators of {namespace}, which communicate"
            with config.patch(graph_partition=False):
                return codegen(self)

        return call

    replace("torch._inductor.graph:GraphLowering.codegen", in_one_part)


def register_scripting(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let ``torch.jit.script`` treat ``function`` as the builtin operator that ``original`` is, if it is one."""
    from torch.jit._builtins import _find_builtin, _register_builtin

    name = _find_builtin(original)  # type: ignore[no-untyped-call]
    if name is not None:
        _register_builtin(function, name)


# -- a plain tensor that becomes another one ---------------------------------------------------------------------------


# Two tensors become each other, but for their class: the objects stay. Nothing else may hold one of them.
exchange_memory: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl


def _references_to_base(view: torch.Tensor) -> int:
    with DisableTorchFunction():
        base = view._base
    return sys.getrefcount(base)


_WITHOUT_PROGRAM = _references_to_base(torch.empty(1).view(1))


def is_base_held(view: torch.Tensor) -> bool:
    """Whether a program holds the tensor that this one is a view of, and not only the view."""
    return _references_to_base(view) > _WITHOUT_PROGRAM


def count_with_memory_of(tensor: torch.Tensor) -> int | None:
    """How many tensors have this one's memory; None where something else may have it, too."""
    storage = tensor.untyped_storage()
    # Of memory on a GPU torch always says that it is shared. What comes from another process cannot be resized there.
    if not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared()):
        return None
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without the object of the storage


def tensors_with_memory_of(tensor: torch.Tensor, classes: Collection[type]) -> list[torch.Tensor] | None:
    """All tensors that have this one's memory, of these classes; None where something else has it, too.

    If a program holds only this one, and not the tensor that it is a view of, the latter does not count.
    """
    count = count_with_memory_of(tensor)
    if count is None:
        return None
    found = {id(tensor): tensor}
    if tensor._base is not None and (count != 2 or is_base_held(tensor)):
        found[id(tensor._base)] = tensor._base
    elif tensor._base is not None:
        count -= 1
    for generation in range(3):  # the youngest first: most are
        if len(found) < count:
            objects = gc.get_objects(generation)
            found.update((id(t), t) for t in objects if type(t) in classes and same_memory(t, tensor))
    tensors = list(found.values())
    # A tensor counts its views, the graphs that have saved it, and the functions that are called with it.
    counts = [1 + sum(view._base is t for view in tensors) + _REFERENCES_OF_CALL * called_with(t) for t in tensors]
    known = [t._use_count() for t in tensors]  # type: ignore[attr-defined]
    return tensors if len(tensors) == count and known == counts else None


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd has a tensor for a view of, or itself."""
    with DisableTorchFunction():
        return tensor if tensor._base is None else tensor._base


# The arguments of each call of a program's own ``autograd.Function`` that is under way, in any thread.
_calls: dict[object, tuple[Any, ...]] = {}


def wrap_functions(classes: frozenset[type], called: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], None]) -> None:
    """Have ``called(cls, args, results)`` called when C++ has called an ``autograd.Function`` of a program's own.

    Args:
        classes: there is one of these among arguments or results, which may hold tensors of the program.
    """
    function: Any = torch.autograd.Function
    in_cpp: Any = vars(torch._C._FunctionBase)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        number = object()
        _calls[number] = args
        try:
            results = in_cpp.__get__(None, cls)(*args, **kwargs)
        finally:
            del _calls[number]
        outputs = results if isinstance(results, tuple) else (results,)
        if not classes.isdisjoint(map(type, args)) or not classes.isdisjoint(map(type, outputs)):
            called(cls, args, outputs)
        return results

    # Before torch 2.14 ``Function.apply`` is Python's, and calls that of the class below.
    owner = function if vars(function)["apply"] is in_cpp else function.__base__
    replace(f"torch.autograd.function:{owner.__name__}.apply", lambda _: classmethod(apply))


def _numbered(identify: Callable[[torch.Tensor], tuple[Any, ...]]) -> Callable[[torch.Tensor], tuple[Any, ...]]:
    """Tell tensors apart by a number, too, inside ``torch.autograd.graph.allow_mutation_on_saved_tensors``.

    torch takes the address and the id of a tensor that is saved, and both are those of another one after it has gone.
    The address of a ShardTensor and of an empty shard is always zero.
    """
    numbers: Any = WeakIdKeyDictionary()
    following = count()

    def numbered(tensor: torch.Tensor) -> tuple[Any, ...]:
        return (*identify(tensor), numbers.setdefault(tensor, next(following)))

    return numbered


replace("torch.autograd.graph:_get_tid", _numbered)


def wrap_from_local(call: Callable[..., Any]) -> None:
    """Have ``call(original, local, mesh, placements, options)`` called in place of ``DTensor.from_local``."""

    def make(original: Callable[..., Any]) -> Any:
        @wraps(original)
        def from_local(local_tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
            return call(original, local_tensor, device_mesh, placements, options)

        return staticmethod(from_local)

    replace("torch.distributed.tensor:DTensor.from_local", make)


class _Counted(torch.autograd.Function):
    """How many references to a tensor there are while C++ calls ``forward`` with it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return torch.tensor(tensor._use_count())


_REFERENCES_OF_CALL = int(_Counted.apply(torch.empty(()))) - 1  # type: ignore[no-untyped-call]


def called_with(tensor: torch.Tensor) -> int:
    """How often a tensor is an argument of a program's own ``autograd.Function`` that is being called."""
    return sum(a is tensor for args in _calls.values() for a in args)


# What C++ calls, in the midst of a call of an ``autograd.Function``, for a tensor that this has written to.
sets_hooks: Any = vars(torch._C.TensorBase)["_backward_hooks"].__set__


def made_without_grad(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view that was taken where autograd is off: it never has a history."""
    autograd: Any = torch._C._autograd
    with DisableTorchFunction():
        return tensor._is_view() and autograd._get_creation_meta(tensor) == autograd.CreationMeta.NO_GRAD_MODE


def flex_attention_gradient(score_mod: Callable[..., Any], like: torch.Tensor, captured: tuple[Any, ...]) -> Any:
    """The gradient of ``score_mod`` as :data:`flex_attention_backward_operator` takes it.

    Args:
        like: a tensor of the scores' dtype and device.
        captured: what ``score_mod`` takes behind the indices.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # the compiler, which flex imports

    score, b, h, i, j = like.new_zeros((), requires_grad=True), *(like.new_zeros((), dtype=torch.int) for _ in range(4))
    with TransformGetItemToIndex():
        return create_fw_bw_graph(score_mod, (score, b, h, i, j), captured)[1]

"""Plain tensors that a network makes and writes sharded values to: ``out = torch.zeros(8, 4); out[:, :2] = x``.

[Note: written tensors] Nobody sees how such a tensor is made, and most of them stay plain: positions, masks, counters.
So nothing happens before a sharded value is written to one. A value without sharded dims, such as a mean, is reduced
and written by each rank, so buffers with running averages stay plain. When a sharded value is written, the plain
tensor, which counted as replicated, becomes a ShardTensor that is replicated and has an open layout, and the value is
written to that ([Note: open layouts]). If the layout stays open, because a sharded index says nothing of the rows, the
tensor stays plain.

The object stays, since the program holds it. It cannot get the class ShardTensor, which has slots. So it becomes a
:class:`WrittenTensor`, which has no memory of its own, and gives each call to the ShardTensor that it represents.

All tensors with the same memory have to see the write, so they become written tensors, too: the tensor that is written
to, the one that it is a view of, and the other views of that. Python's garbage collector knows those that a program
holds, and torch's count of them tells whether these are all. Both are the same on all ranks of a program that does the
same on all, once what waits for being collected is collected. Other holders of that memory are graphs that have saved
the tensor. Memory that came from elsewhere, such as an array's, is not counted. C++ has references to the arguments of
an ``autograd.Function`` that is being called; these are known. Refused are tensors with other holders, leaves that
require grad, and views that are not taken by an index and an order of dims.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node, increment_version

from .._compat import (
    AutogradFunction,
    DisableTorchFunction,
    FakeTensor,
    FunctionalTensor,
    FunctionContext,
    breaking_graph,
    called_with,
    claim_dispatch,
    exchange_memory,
    made_without_grad,
    sets_hooks,
    tensors_with_memory_of,
    tracing,
    whole_of,
)
from ..errors import refuse
from .metrics import warn_of_state
from .open_layouts import Take, leave_open, taken_by_index
from .planning import converted, flat
from .size_errors import writes
from .tensor import ShardTensor, promote, redistribute_to, to_part

# Classes of plain tensors, but for parameters; previews have tensors without data.
PLAIN = frozenset({Tensor, FakeTensor})
MAY_BE_WRITTEN = PLAIN | {torch.nn.Parameter, FunctionalTensor}
LISTS = frozenset({list, tuple})

_Family: TypeAlias = "WeakValueDictionary[int, WrittenTensor]"
_History: TypeAlias = "tuple[Node | None, bool]"  # grad_fn and requires_grad


class WrittenTensor(Tensor):
    """Stands for a ShardTensor where a program holds the plain tensor that it was, and says that it is one.

    Attributes:
        sharded: the ShardTensor. Its attributes and methods are this tensor's, too.
        family: the written tensors that share its memory, this one included, by their ids.
        histories: what autograd knew of this tensor, and of the ShardTensor, when it began to represent it.
        former: what an ``autograd.Function`` may have saved in place of this tensor, since the last write.
    """

    sharded: ShardTensor
    family: _Family
    histories: tuple[_History, _History]
    former: list[Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == sets_hooks:
            with DisableTorchFunction():
                return func(*args)
        return call_on_sharded(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _called(func, args, kwargs or {})  # autograd is done with the call

    def __tensor_flatten__(self) -> NoReturn:
        reason = "an input was a plain tensor until a sharded value was written to it, and a graph has no such tensors"
        raise breaking_graph(
            refuse("torch.compile", [self.sharded], reason, "pass its clone(), which is a ShardTensor")
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sharded"], name)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.sharded)

    @property  # type: ignore[misc]
    def __class__(self) -> type[ShardTensor]:  # type: ignore[override]  # for isinstance()
        return type(self.sharded)


claim_dispatch(WrittenTensor)


def call_on_sharded(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call in which ShardTensors take the place of written tensors.

    One that returns its first operand does so, and views of it are written tensors, too.
    """
    for a in flat(args, kwargs):
        if type(a) is WrittenTensor and _history(a)[0] is not a.histories[0][0]:
            _take_history(a)
    return _called(func, args, kwargs)


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    first = args[0] if args and type(args[0]) is WrittenTensor else None
    args, kwargs = converted(lambda a: a.sharded if type(a) is WrittenTensor else a, args, kwargs)
    name = func.__name__
    if name == "__get__":  # of an attribute, which ShardTensor may define itself; and so with methods
        return getattr(args[0], func.__self__.__name__)
    if name == "__set__":
        result = setattr(args[0], func.__self__.__name__, args[1])  # type: ignore[func-returns-value]
    else:
        is_method = first is not None and getattr(Tensor, name, None) is func
        result = (getattr(type(args[0]), name) if is_method else func)(*args, **kwargs)
    if first is None:
        return result
    if name == "__set__" or writes(func):
        _note_write(list(first.family.values()), always=name == "__set__")
    (result,), _ = converted(lambda r: _standing_for(r, first), (result,), {})
    return result


def _standing_for(result: object, first: WrittenTensor) -> object:
    """What a call with a written tensor returns: that tensor, another one for a view of it, or a new tensor."""
    if result is first.sharded:
        return first
    if type(result) is not type(first.sharded) or whole_of(result) is not whole_of(first.sharded):
        return result
    view: WrittenTensor = _Standing.apply(result)
    _stand(view, result, first.family)
    return view


def _stand(written: WrittenTensor, sharded: ShardTensor, family: _Family) -> None:
    histories = _history(written), _history(sharded)
    written.__dict__.update(sharded=sharded, family=family, histories=histories, former=[])
    family[id(written)] = written


def _note_write(family: Sequence[WrittenTensor], *, always: bool) -> None:
    with DisableTorchFunction():
        saved = [t for written in family for t in (written, *written.former) if not t.is_inference()]
    increment_version(saved)
    _stand_anew(family, always=always)
    for written in family:
        written.former.clear()


def _stand_anew(family: Iterable[WrittenTensor], *, always: bool = False) -> None:
    """Have tensors represent ShardTensors of which autograd knows something else than it did.

    The others stay the tensors that an ``autograd.Function`` knows as its inputs.
    """
    for written in family:
        sharded = written.sharded
        if always or (not made_without_grad(sharded) and _history(sharded) != written.histories[1]):
            former = _Standing.apply(sharded)
            exchange_memory(written, former)
            written.former.append(former)
            written.__dict__["histories"] = _history(written), _history(sharded)


def _history(tensor: Tensor) -> _History:
    with DisableTorchFunction():
        return tensor.grad_fn, tensor.requires_grad


def _take_history(written: WrittenTensor) -> None:
    """An ``autograd.Function`` has returned this tensor, or written to it: so it has with its ShardTensor."""
    sharded, whole = written.sharded, whole_of(written.sharded)
    # Of a view that it has returned, nobody has the whole, which has no history.
    is_part = whole is not sharded and all(other.sharded is not whole for other in written.family.values())
    with torch.enable_grad():
        written.__dict__["sharded"] = _Taking.apply(sharded, written, not is_part)
        _stand_anew(list(written.family.values()))


def write_to_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An in-place function whose first argument is plain, or a list of plain tensors.

    NotImplemented where a sharded value is written to what cannot become a written tensor.
    """
    written: Any = args[0]
    is_list = isinstance(written, (list, tuple))
    if is_list and not all(type(t) in MAY_BE_WRITTEN for t in written):
        return NotImplemented
    operands = [a for a in flat(args, kwargs) if isinstance(a, ShardTensor)]
    if operands and not is_list:
        warn_of_state(written, operands[0]._spec.mesh)
    if not any(a._spec.sharded_dims() for a in operands):  # every rank writes the same to its own, which stays plain
        given = converted(lambda a: _of_every_rank(a) if isinstance(a, ShardTensor) else a, args, kwargs)
        return func(*given[0], **given[1])
    if is_list or tracing():
        return NotImplemented
    mesh = operands[0]._spec.mesh
    if written.layout is not torch.strided or written.device.type != mesh.device_type:
        return NotImplemented
    held = _whole_and_views(written)
    if held is None and type(written) in PLAIN:
        gc.collect()
        held = _whole_and_views(written)
    if held is None:
        return NotImplemented
    whole, views = held
    with torch.enable_grad():
        sharded = promote(whole, mesh)
    leave_open(sharded)
    pairs: list[tuple[Any, Any]] = [(whole, sharded)]
    pairs += [(view, _taken_anew(view, take, sharded)) for view, take in views]
    target = next(new for plain, new in pairs if plain is written)
    result = func(target, *args[1:], **kwargs)  # where it is refused, the tensors stay what they are
    if sharded._spec.is_replicate() and not target.requires_grad:  # a sum over an index: it has the values already
        return written if result is target else result
    family: _Family = WeakValueDictionary()
    for plain, new in pairs:
        exchange_memory(plain, _Standing.apply(new))
        plain.__class__ = WrittenTensor
        _stand(plain, new, family)
    if called_with(whole):  # C++ goes on with what was the argument
        warnings.filterwarnings("ignore", r"ctx\.mark_dirty\(\) received a tensor that was not an input")
    return written if result is target else result


def _of_every_rank(tensor: ShardTensor) -> Tensor:
    """What a tensor without sharded dims holds, reduced where it is Partial."""
    whole = redistribute_to(tensor, tensor._spec.replicated())
    return to_part(whole, whole._spec)


def _whole_and_views(written: Any) -> tuple[Tensor, list[tuple[Tensor, Take]]] | None:
    """Of the tensors with this one's memory: which has all of it, and how each other is taken of that.

    None where these are not all, or one cannot become a written tensor.
    """
    tensors = tensors_with_memory_of(written, PLAIN)
    if tensors is None or any(type(t) not in PLAIN or (t.requires_grad and t.is_leaf) for t in tensors):
        return None
    base = written._base
    whole = base if any(t is base for t in tensors) else max(tensors, key=lambda t: (t.numel(), t is written))
    views: list[tuple[Any, Take]] = []
    for t in tensors:
        if t is not whole:
            take = taken_by_index(whole, t)
            if take is None or (t._base is not None and t._base is not whole):
                return None
            views.append((t, take if t._base is whole else partial(_detached, take)))
    return whole, views


def _taken_anew(view: Tensor, take: Take, sharded: ShardTensor) -> Tensor:
    """A view of the ShardTensor that gets a history where the plain one would, and not as the write does."""
    with torch.set_grad_enabled(not made_without_grad(view)):
        return take(sharded)


def _detached(take: Take, whole: Tensor) -> Tensor:
    """A view of which autograd does not know that it is one."""
    return take(whole).detach()


class _Standing(AutogradFunction):
    """A written tensor without the ShardTensor that it represents, to whose graph it leads."""

    @staticmethod
    def forward(ctx: FunctionContext, sharded: ShardTensor) -> WrittenTensor:
        meta = sharded._spec.tensor_meta
        return Tensor._make_wrapper_subclass(
            WrittenTensor, meta.shape, meta.stride, dtype=meta.dtype, device=sharded.device
        )

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> Tensor:
        return grad


class _Taking(AutogradFunction):
    """A ShardTensor with the history of the written tensor that represents it, which has its values already."""

    @staticmethod
    def forward(ctx: FunctionContext, sharded: ShardTensor, written: WrittenTensor, in_place: bool) -> ShardTensor:
        ctx.set_materialize_grads(False)
        if in_place:
            ctx.mark_dirty(sharded)
        return sharded

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> tuple[None, Tensor | None, None]:
        return None, grad, None


def is_of_written(node: object) -> bool:
    """Whether a node of a graph is that of a written tensor, or of the ShardTensor that it represents."""
    return isinstance(node, (_Standing._backward_cls, _Taking._backward_cls))

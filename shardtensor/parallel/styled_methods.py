"""Methods of a module that run with other arguments, and with another result, than the caller sees.

``forward`` is styled by hooks, so that it may be compiled or replaced afterwards; any other method by a function of the
instance that calls it. That function is bound to the instance, so that a deep copy of the module gets its own.

A style for ``forward`` does nothing if the program calls another method of the module, and nothing would say so: the
numbers are right, but every rank computes all of them. So until a styled method runs for the first time, hooks notice
calls of submodules with plain tensors. From then on the submodules have no hooks, which would take time and break
compiled graphs. At the end of the program the modules are named whose styled methods never ran.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from traceback import walk_stack
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .._compat import not_in_graphs
from .repeated_work import RepeatedWork


@dataclass(frozen=True)
class Style:
    """What is done around the calls of methods.

    Attributes:
        given: makes the arguments of a method from those of the caller: ``given(method, args, kwargs)``.
        returned: makes the result from what the method returns.
    """

    given: Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]
    returned: Callable[[Any], Any]


@dataclass(eq=False)
class _Use:
    """How a module with styles, or a copy of it, is used.

    Attributes:
        name: of its class.
        methods: those that have a style.
        ran: those of them that have run.
        others: methods that have run submodules on plain tensors before that.
        watching: the hooks that notice these.
    """

    name: str
    methods: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    watching: list[RemovableHandle] = field(default_factory=list)


class _Call:
    """A call of a styled method: whose it is, and the calls around it."""

    def __init__(self, use: _Use, module: nn.Module, method: str) -> None:
        self.use, self.module, self.outer = use, module, _calls.get()
        self.is_inner = _runs(use, module)
        while use.watching:
            use.watching.pop().remove()
        self.looks_at: RepeatedWork | None = None
        if method not in use.ran:
            use.ran.append(method)
            self.looks_at = RepeatedWork(module, f"DomainParallel, {_calls_of(use, [method])}")
        _calls.set((*self.outer, self))

    def end(self) -> None:
        _calls.set(self.outer)
        if self.looks_at:
            self.looks_at.end()


_calls: ContextVar[tuple[_Call, ...]] = ContextVar("calls of styled methods", default=())
_use_of: WeakKeyDictionary[nn.Module, _Use] = WeakKeyDictionary()
_uses: list[_Use] = []


def _runs(use: _Use, module: nn.Module) -> bool:
    return any(call.use is use and call.module is module for call in _calls.get())


def apply_style(module: nn.Module, method: str, style: Style, no_graph: str) -> None:
    """Give a method of the module the style. Where another method calls it that has a style, nothing is done.

    Args:
        no_graph: why torch.compile leaves out what is done.
    """
    use = _use_of.get(module)
    if use is None:
        use = _use_of[module] = _Use(type(module).__name__)
        _uses.append(use)
        _watch(module, use)
    use.methods.append(method)
    (_hook_forward if method == "forward" else _replace)(module, method, style, use, not_in_graphs(no_graph))


def _hook_forward(module: nn.Module, _: str, style: Style, use: _Use, decorate: Callable[[Any], Any]) -> None:
    @decorate
    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(use, called, "forward")
        return None if call.is_inner else style.given("forward", args, kwargs)

    @decorate
    def leave(called: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (calls := _calls.get()) and calls[-1].module is called:  # not where another hook has raised before
            calls[-1].end()

    @decorate
    def after(called: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if _runs(use, called) else style.returned(output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    module.register_forward_hook(after)


def _replace(module: nn.Module, method: str, style: Style, use: _Use, decorate: Callable[[Any], Any]) -> None:
    bound = getattr(module, method)
    is_own = isinstance(bound, MethodType) and bound.__self__ is module

    @decorate
    @wraps(bound)
    def styled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = MethodType(bound.__func__, self) if is_own else bound
        call = _Call(use, self, method)
        try:
            if call.is_inner:
                return function(*args, **kwargs)
            args, kwargs = style.given(method, args, kwargs)
            output = function(*args, **kwargs)
        finally:
            call.end()
        return style.returned(output)

    setattr(module, method, MethodType(styled, module))


# -- unused styles ----------------------------------------------------------------------------------------------------


def _watch(module: nn.Module, use: _Use) -> None:
    """Notice calls of submodules with plain tensors by methods of the module that have no style."""

    def note(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if use.ran:  # this is a copy's submodule
            return
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not tensors or any(isinstance(t, DTensor) for t in tensors):
            return
        method = _caller(use.name, called)
        if not method or method in use.others:
            return
        use.others.append(method)
        if use.methods == ["forward"]:  # who has named methods may want no others
            remedy = "Call the module itself rather than its forward()" if method == "forward" else _REMEDY
            warnings.warn(
                f"DomainParallel was applied to {_calls_of(use, use.methods)}, but the program called "
                f"{_calls_of(use, [method])}, which ran submodules on plain tensors. {remedy}",
                stacklevel=4,
            )

    for submodule in _submodules(module):
        use.watching.append(submodule.register_forward_pre_hook(note, with_kwargs=True))


def _submodules(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost ones that can be called, which lists of modules cannot."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _submodules(child)
        else:
            yield child


def _caller(name: str, submodule: nn.Module) -> str:
    """The outermost method of the module of this class that has led to the call of its submodule, if one has."""
    found = ""
    for frame, _ in walk_stack(sys._getframe(3)):
        method = frame.f_code.co_name
        of_module = hasattr(nn.Module, method) and method != "forward"  # its machinery
        owner = None if of_module else frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and type(owner).__name__ == name and hasattr(type(owner), method):
            found = method if any(m is submodule for m in owner.modules()) else found
    return found


_REMEDY = (
    "Every rank computes all of it. Give the style to the methods that the program calls, "
    'DomainParallel(..., methods=("encode", "decode")), or to the submodules that these call'
)


def _calls_of(use: _Use, methods: Sequence[str]) -> str:
    return " and ".join(f"{use.name}.{method}()" for method in methods)


@atexit.register
def _name_unused() -> None:
    if hasattr(sys, "last_value"):  # the program ends by an exception, and may not have come so far
        return
    for use in _uses:
        if use.ran or (use.others and use.methods == ["forward"]):  # that has been said
            continue
        instead = f", but {_calls_of(use, use.others)}" if use.others else ""
        warnings.warn(
            f"DomainParallel was applied to {_calls_of(use, use.methods)}, which this program has not called{instead}. "
            f"{_REMEDY}",
            stacklevel=1,
        )

"""Patched functions: an entry point for calls that torch does not dispatch. One declared table, wrapped by ``wrapt``.

Correctness does not depend on these patches: ``__torch_function__`` sees every call that torch lets it see, and the
aten rules see the rest. The patches serve calls that it does not see: functions called from Python composites that run
with torch functions disabled, libraries without a dispatch mechanism, such as natten, and a module of torch that asks
for a device before it calls one.

For callers without ShardTensors a patched function must not differ from the original. Its results are bitwise equal,
and its signature is the same. It pickles and deep-copies by name, so modules that hold it do, too, and unpickle where
this package is not installed. ``torch.jit.script`` compiles it as the builtin that it wraps. Functions of
``torch.nn.functional`` that are written in Python call ``__torch_function__`` themselves and need no patch.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType
from typing import Any, NoReturn

import wrapt
from torch.overrides import handle_torch_function

from .._compat import function_modes_enabled, register_scripting
from .._compat.replaced import find, put, when_imported
from ..errors import refuse
from .entry import enter
from .tensor import ShardTensor
from .written import WrittenTensor, call_on_sharded


@dataclass(frozen=True, slots=True)
class Patch:
    """One patched function, or method of a class.

    Attributes:
        module, name: where callers find it; of a method, the name includes the class.
        lazy: patch it when the user imports the module, not before.
        required: a call on a ShardTensor without a registered handler is refused: the function itself would read
            memory that a ShardTensor does not have.
    """

    module: str
    name: str
    lazy: bool = False
    required: bool = False


PATCHES = (
    Patch("torch.nn.functional", "conv1d"),
    Patch("torch.nn.functional", "conv2d"),
    Patch("torch.nn.functional", "conv3d"),
    Patch("torch.nn.functional", "linear"),
    Patch("torch.nn.functional", "l1_loss"),  # it calls __torch_function__, but without the weight
    Patch("torch.nn", "SyncBatchNorm.forward"),  # it refuses CPUs, and runs with torch functions out of sight
    # They would return the address of memory that a ShardTensor does not have.
    Patch("torch", "to_dlpack", required=True),
    Patch("torch.utils.dlpack", "to_dlpack", required=True),
    Patch("natten.functional", "neighborhood_attention_generic", lazy=True, required=True),
    Patch("natten.modules", "neighborhood_attention_generic", lazy=True, required=True),
    Patch("natten.functional", "attention", lazy=True, required=True),
    Patch("natten.functional", "merge_attentions", lazy=True, required=True),
    Patch("natten", "attention", lazy=True, required=True),
    Patch("natten", "merge_attentions", lazy=True, required=True),
    Patch("opt_einsum.contract", "infer_backend", lazy=True),
)


# In which there may be ShardTensors.
_TO_LOOK_AT = frozenset({ShardTensor, WrittenTensor, list})


def _operands(values: Iterable[Any]) -> list[ShardTensor]:
    """The ShardTensors among some arguments, including those in lists."""
    found = []
    for value in values:
        if isinstance(value, ShardTensor):
            found.append(value)
        elif type(value) is list:
            found += [item for item in value if isinstance(item, ShardTensor)]
    return found


class PatchedFunction(wrapt.FunctionWrapper):  # type: ignore[type-arg]  # not generic before wrapt 2
    """A function that hands ShardTensors to their registered handler, and is the original to everyone else."""

    def __init__(self, wrapped: Callable[..., Any], patch: Patch) -> None:
        super().__init__(wrapped, self._self_call)
        self._self_patch = patch

    def _self_call(
        self, wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if ShardTensor not in map(type, args):
            if _TO_LOOK_AT.isdisjoint(map(type, args)) and (
                not kwargs or _TO_LOOK_AT.isdisjoint(map(type, kwargs.values()))
            ):
                return wrapped(*args, **kwargs)
            operands = _operands((*args, *kwargs.values()))
            if not operands:
                return wrapped(*args, **kwargs)
            if WrittenTensor in map(type, operands):
                return call_on_sharded(self, args, kwargs)
        if function_modes_enabled() and type(self) is PatchedFunction:  # of a method they see what it calls
            return handle_torch_function(self, _operands((*args, *kwargs.values())), *args, **kwargs)
        otherwise = self._refused if self._self_patch.required else wrapped
        return enter(ShardTensor, wrapped, (ShardTensor,), args, kwargs, otherwise=otherwise)

    def _refused(self, *args: object, **kwargs: object) -> NoReturn:
        raise refuse(
            f"{self._self_patch.module}.{self._self_patch.name}",
            _operands(args) or _operands(kwargs.values()),
            "no distributed form is registered",
            "call it on to_local() of replicated tensors, or register a handler with shardtensor.extend.register",
        )

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[[str], Any], tuple[str]]:
        return pkgutil.resolve_name, (f"{self._self_patch.module}:{self._self_patch.name}",)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return self.__reduce_ex__(2)

    def __copy__(self) -> PatchedFunction:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedFunction:
        return self


class PatchedMethod(PatchedFunction):
    """The same of a method. Bound to an object it is like every other."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)


# Import hooks cannot be removed: each is set once, and does nothing while patches are not active.
_hooked: set[Patch] = set()
_active = False


def install() -> None:
    """Install all patches (``import shardtensor`` does); those of libraries wait until the library is imported."""
    global _active
    _active = True
    for patch in PATCHES:
        if not patch.lazy or sys.modules.get(patch.module) is not None:
            _apply(patch)
        elif patch not in _hooked:
            _hooked.add(patch)
            when_imported(_name(patch), partial(_on_import, patch))


def uninstall() -> None:
    """Restore the original functions; results on ShardTensors do not depend on the patches, see above."""
    global _active
    _active = False
    for patch in PATCHES:
        if isinstance(_found(patch), PatchedFunction):
            put(_name(patch), lambda patched: patched.__wrapped__)


def installed() -> list[str]:
    """Names of the functions that are patched now."""
    return [f"{p.module}.{p.name}" for p in PATCHES if isinstance(_found(p), PatchedFunction)]


def _name(patch: Patch) -> str:
    return f"{patch.module}:{patch.name}"


def _found(patch: Patch) -> Any:
    """What is there now; None if there is nothing."""
    owner, name = find(_name(patch))
    return getattr(owner, name, None)


def _apply(patch: Patch) -> None:
    importlib.import_module(patch.module)
    original = _found(patch)
    if original is None or isinstance(original, PatchedFunction):
        return
    patched = (PatchedMethod if "." in patch.name else PatchedFunction)(original, patch)
    register_scripting(patched, original)
    put(_name(patch), lambda _: patched)


def _on_import(patch: Patch, module: ModuleType) -> None:
    if _active:
        _apply(patch)

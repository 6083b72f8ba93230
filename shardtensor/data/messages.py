"""What a source tells the other ranks of its batches and errors, as JSON: no rank unpickles what it receives.

A batch is sent as its structure, with a :class:`MeshlessSpec` for each tensor; besides these it may hold None, bool,
int, float, str and bytes. Strings, numbers and None are written as they are, all else as a list that starts with a
letter for its type.
"""

from __future__ import annotations

import base64
import builtins
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import default_convert

from .._compat import SUPPORTED_NODES, PyTree
from ..ranks.agreement import DTYPES
from .layout import Layout, MakeSpec, MeshlessSpec

_PLAIN = {type(None), bool, int, float, str}
_DTYPES = {str(dtype): dtype for dtype in DTYPES}


def is_side_data(leaf: object) -> bool:
    """Whether ``leaf`` of a batch is sent by its value."""
    return type(leaf) in _PLAIN or type(leaf) is bytes


def cannot_send(value: object) -> TypeError:
    """The exception for something in a batch that is neither a tensor nor can be sent by its value."""
    kind = type(value)
    return TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the other ranks. Besides tensors and "
        "arrays a batch holds None, bool, int, float, str and bytes, in lists, tuples, dicts and named tuples. Convert "
        "it to these, register its class with torch.utils._pytree, or, if every rank may unpickle what the source "
        "sends, which can run any code, pass ShardLoader(..., pickled=True) on all ranks"
    )


def describe(batch: PyTree, layout: Layout, tensors: list[Tensor], pickled: bool = False) -> PyTree:
    """The batch with a :class:`MeshlessSpec` for each tensor or array; the tensors are appended to ``tensors``.

    Args:
        pickled: whether it may hold what cannot be sent by its value.

    Raises:
        TypeError, ValueError: something that cannot be sent, or a layout that does not fit.
    """

    def collect(leaf: object, spec: MakeSpec) -> object:
        if is_side_data(leaf):
            return leaf
        leaf = default_convert(leaf)  # type: ignore[no-untyped-call]  # arrays become tensors
        if not isinstance(leaf, Tensor):
            if pickled:
                return leaf
            raise cannot_send(leaf)
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
            raise TypeError(
                f"a batch holds plain dense tensors, not a {type(leaf).__name__} ({leaf.layout}). Convert it in the "
                "dataset: to_dense() of a sparse tensor; as_tensor() of a MetaTensor, or for all of them "
                "EnsureTyped(keys, track_meta=False) as the last of MONAI's transforms"
            )
        tensors.append(leaf.detach())
        return MeshlessSpec.of(spec(leaf.shape, leaf.dtype))

    return layout.map(collect, batch)


def encode(batch: PyTree) -> bytes:
    """The message for a batch whose tensors have been replaced by their :class:`MeshlessSpec`.

    Raises:
        TypeError: something that cannot be sent.
    """
    types: set[str] = set()
    body = _encoded(batch, types)
    return json.dumps([sorted(types), body]).encode()


def parse(message: bytes) -> tuple[list[str], Any]:
    """The names of the types in a message that have to be known, and what :func:`build` makes the batch of."""
    types, body = json.loads(message)
    return types, body


def _encoded(value: Any, types: set[str]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return ["l" if kind is list else "t", *(_encoded(v, types) for v in value)]
    if kind is dict:
        return ["d", *(_encoded(k, types) for k in value), *(_encoded(v, types) for v in value.values())]
    if kind is MeshlessSpec:
        dims = [p.dim if isinstance(p, Shard) else None for p in value.placements]
        return ["p", value.shape, str(value.dtype), dims, value.sizes]
    if kind is bytes:
        return ["b", base64.b64encode(value).decode()]
    if kind in SUPPORTED_NODES:
        children, context = SUPPORTED_NODES[kind].flatten_fn(value)
    elif _is_named_tuple(kind):
        children, context = value, None
    else:
        raise cannot_send(value)
    types.add(_name(kind))
    return ["n", _name(kind), _encoded(context, types), *(_encoded(v, types) for v in children)]


def build(value: Any) -> PyTree:
    """The batch that :func:`encode` was given; no type in it may be :func:`unknown`."""
    if type(value) is not list:
        return value
    kind, *rest = value
    if kind == "l":
        return list(map(build, rest))
    if kind == "t":
        return tuple(map(build, rest))
    if kind == "d":
        n = len(rest) // 2
        return dict(zip(map(build, rest[:n]), map(build, rest[n:])))
    if kind == "p":
        shape, dtype, dims, sizes = rest
        placements = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
        sizes = tuple(None if s is None else tuple(s) for s in sizes)
        return MeshlessSpec(tuple(shape), _DTYPES[dtype], placements, sizes)
    if kind == "b":
        return base64.b64decode(rest[0])
    name, context, *children = rest
    of: Any = _class(name)
    assert of is not None, f"{name} is unknown"
    values = list(map(build, children))
    return SUPPORTED_NODES[of].unflatten_fn(values, build(context)) if of in SUPPORTED_NODES else of._make(values)


# -- types ------------------------------------------------------------------------------------------------------------


def lacking(types: Iterable[str]) -> str:
    """Those of the types of a message that this process does not have."""
    return ", ".join(name for name in types if _class(name) is None)


def check_known(lacked: Mapping[int, str]) -> None:
    """TypeError where a rank has answered :func:`lacking` with some types; all ranks have all answers."""
    if ranks := {rank: names for rank, names in lacked.items() if names}:
        raise TypeError(
            f"a batch holds types that some ranks do not know: {ranks}. Import their modules on every rank (on "
            "top level, a named tuple under its own name; register the others with torch.utils._pytree)"
        )


def _class(name: str) -> type | None:
    """The class of this name, among those that this rank's program has imported.

    Lists, tuples and dicts are built from the message alone. A named tuple, or a class that has been registered with
    ``torch.utils._pytree``, goes by its name, and is looked up among the imported classes of these two kinds. So a
    message can neither import a module nor call anything else.
    """
    for kind in SUPPORTED_NODES:
        if _name(kind) == name:
            return kind
    module, _, path = name.partition("(")[0].partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr might run code, such as a lazy import
    return found if _is_named_tuple(found) and _name(found) == name else None


def _name(kind: Any) -> str:
    """Module and name, and the fields of a named tuple."""
    fields = f"({', '.join(kind._fields)})" if _is_named_tuple(kind) else ""
    return f"{kind.__module__}:{kind.__qualname__}{fields}"


def _is_named_tuple(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and type(getattr(kind, "_fields", None)) is tuple


# -- errors -----------------------------------------------------------------------------------------------------------


def encode_error(error: Exception, traceback: str) -> bytes:
    """The message for what the source's loader has raised.

    A class of Python's own arrives as it is, another as its nearest base that is one, with its name in the text.
    """
    kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    args = None
    if kind is not type(error) and kind is Exception:
        kind = RuntimeError
    if kind is type(error):
        args = list(error.__reduce__()[1])  # an OSError's file name is not in its args
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    if args is None or not _PLAIN.issuperset(map(type, args)):
        args = [text]
    return json.dumps([kind.__name__, args, text, traceback]).encode()


def decode_error(message: bytes) -> tuple[Exception, str]:
    """The exception, and the source's traceback as a text."""
    name, args, text, traceback = json.loads(message)
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(*args), traceback
        except Exception:  # it takes other arguments
            pass
    return RuntimeError(text), traceback

"""``DomainParallel``: a module that takes plain tensors, runs on shards of them, and returns plain or sharded tensors.

Layouts are nested like the arguments or results that they are for. A layout applies to all tensors below the place
where it stands, if they have the dims that it shards: with ``Shard(3)`` images, masks and the maps of a pyramid are
sharded, but time steps and prompts are not. If there are tensors and none of them has these dims, that is an error.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from .._compat import is_traced
from ..dispatch.scatter import own_part
from ..dispatch.tensor import ShardTensor, promote, wrap
from ..layout.intervals import aligned_sizes
from ..layout.placements import ShardSizes, mesh_dim_of
from ..layout.spec import ShardTensorSpec
from ..ranks.agreement import compare_histories, gather_over_mesh, record_over_mesh
from ..ranks.compared_operands import CALLS, wanted
from ..ranks.debug_mode import debug_enabled
from ..ranks.equal_values import Copy, compare
from .styled_methods import Style, apply_style

# One placement per mesh dim.
Layout = tuple[Placement, ...]
# Layouts by name or by index, nested; None: leave it as it is. What users give is turned into these by _normalized.
Layouts = Layout | Mapping[Any, Any] | None

_log = logging.getLogger(__name__)

_NO_GRAPH = (
    "DomainParallel makes ShardTensors; compile the module's forward (module.forward = torch.compile(...)) instead"
)


class DomainParallel(ParallelStyle):
    """A style for ``parallelize_module``: shard the inputs of a module, run it, and return outputs in a given layout.

    The module keeps its plain weights, which must be equal on all ranks (:func:`shardtensor.parallel.synchronize`).
    Plain inputs hold the global tensor on every rank of the mesh, so sharding them sends nothing. They may be on the
    CPU, or another device: this rank's part is moved to the mesh's. ShardTensors and DTensors are redistributed. The
    gradients of plain inputs and weights are plain, global, and equal on all ranks.

    The program gets a warning if it first calls a method without the style, because this runs the submodules on plain
    tensors. It also gets one if it ends before a method with the style has run, and one after the first call of a
    method, if all ranks do so much of the work alike that each has more than 1.2 times its part.

    Args:
        inputs: the layout of the inputs: one placement, or on a mesh of several dims a tuple with one per mesh dim. It
            applies to every tensor in the arguments that has the dims to be sharded, also inside of lists, tuples,
            dicts and dataclasses. Other tensors stay plain, and count as replicated. You may also pass a dict of
            layouts by the names of the method's parameters, or a list of layouts by their position. Both may be nested
            like the arguments. Arguments that are left out, or None, stay unchanged.
        outputs: the layout of the outputs, or layouts by name or position. None: unchanged. This includes ShardTensors
            in attributes of a returned object, such as a distribution.
        methods: names of the methods that get the style. If one of them calls another, the inner call takes its
            arguments unchanged. Layouts by name need parameters that all methods have; otherwise apply a style for each
            method.
        shard_sizes: ``(size on rank 0, size on rank 1, ...)`` of the inputs where one mesh dim shards, or
            ``{mesh_dim or its name: sizes}``. "even": torch.chunk's sizes. None: the same, but ShardTensors that have
            the placements already keep their sizes.
        align: every boundary between shards is at a multiple of this number, or of ``{mesh_dim: number}``; the shards
            are as even as possible. Use the product of a network's strides to avoid halos of strided windows.
        use_local_output: whether outputs are plain tensors, the local tensor of each rank. None: replicated outputs are
            plain, and sharded outputs are ShardTensors.
        when: "always", or "auto": without gradients, run plain inputs without shards if that is faster. The first four
            calls with inputs of the same shapes are timed, if they take less than 0.1 seconds on shards. The result is
            logged (``logging.getLogger("shardtensor")``, level INFO). Outputs have the same layout in both cases.
            "auto" needs one layout for all outputs.

    Raises:
        TypeError, ValueError: invalid layouts. When the style is applied: layouts that do not fit the mesh or the
            parameters of a method, or a method that the module does not have. In a call, on every rank, before anything
            is sent: no tensor has the dims to be sharded, or shard sizes do not add up to its length.
        RanksDiffer: in the first calls with inputs of a layout, or in all calls with ``SHARDTENSOR_DEBUG=1``, on every
            rank: plain inputs, or plain weights that the module has used, differ between ranks.

    Example::

        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("domain",))
        style = DomainParallel(inputs=Shard(3), outputs=Replicate())   # latents (N, C, H, W)
        parallelize_module(vae.decoder, mesh["domain"], style)
        image = vae.decode(latents).sample                             # plain, on every rank

        style = DomainParallel(inputs=Shard(3), outputs=Replicate(), methods=("encode", "decode"))
        parallelize_module(vae, mesh["domain"], style)                 # with all that these methods do
    """

    def __init__(
        self,
        *,
        inputs: Any,
        outputs: Any,
        shard_sizes: ShardSizes = None,
        align: int | Mapping[int, int] = 1,
        use_local_output: bool | None = None,
        methods: Sequence[str] = ("forward",),
        when: str = "always",
    ) -> None:
        super().__init__()
        if when not in ("always", "auto"):
            raise ValueError(f'when={when!r}: "always" or "auto"')
        if isinstance(methods, str) or not methods or not all(isinstance(name, str) for name in methods):
            raise TypeError(f"methods={methods!r}: a tuple of names of methods")
        multiples = tuple(align.values()) if isinstance(align, Mapping) else (align,)
        if not all(isinstance(n, int) and n > 0 for n in multiples):
            raise ValueError(f"align={align!r}: a positive integer, or {{mesh_dim: integer}}")
        if align != 1 and shard_sizes is not None:
            raise ValueError(f"shard_sizes={shard_sizes!r} and align={align!r}: give only one of them")
        self.inputs = _normalized("inputs", inputs)
        self.outputs = _normalized("outputs", outputs)
        if when == "auto" and not isinstance(self.outputs, tuple):
            raise ValueError(
                f'outputs={outputs!r} and when="auto": unchanged outputs would be sharded in some calls and plain in '
                "others; give one layout for all outputs"
            )
        self.when = when
        self.shard_sizes = shard_sizes
        self.align = align
        self.use_local_output = use_local_output
        self.methods = tuple(methods)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for what, layouts in (("inputs", self.inputs), ("outputs", self.outputs)):
            _check_mesh(what, layouts, device_mesh)
        for what, given in (("shard_sizes", self.shard_sizes), ("align", self.align)):
            keys = given if isinstance(given, Mapping) else ()
            if not all(mesh_dim_of(key, device_mesh) in range(device_mesh.ndim) for key in keys):
                raise ValueError(f"{what}={given} names mesh dims beyond those of the mesh {tuple(device_mesh.shape)}")
        name = type(module).__name__
        for method in self.methods:
            if not callable(getattr(module, method, None)):
                raise ValueError(f"methods names {method!r}, which {name} does not have")
        signatures = {method: inspect.signature(getattr(module, method)) for method in self.methods}
        parameters = {method: _Parameters(f"{name}.{method}", given) for method, given in signatures.items()}
        inputs = {method: own.by_name(self.inputs) for method, own in parameters.items()}
        checks = _Checks(f"plain inputs of {name} (DomainParallel)", device_mesh)
        faster = _FasterWay(name, device_mesh) if self.when == "auto" and device_mesh.size() > 1 else None

        def shard(tensor: Tensor, layout: Layout) -> Tensor:
            return _laid_out(tensor, device_mesh, layout, self._sizes(tensor, device_mesh, layout))

        def give_back(tensor: Tensor, layout: Layout) -> Tensor:
            replicated = all(p.is_replicate() for p in layout)
            local = replicated if self.use_local_output is None else self.use_local_output
            if local and replicated and not isinstance(tensor, DTensor):
                return tensor
            result = _laid_out(tensor, device_mesh, layout, None)
            return result.to_local() if local else result

        def as_given(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            values, layouts = parameters[method].named(args, kwargs), inputs[method]
            here = {k: own for k, own in layouts.items() if k in values} if isinstance(layouts, dict) else layouts
            tensors = list(_tensors(values, here, "inputs"))
            checks.before(method, tensors)
            if faster and faster.begin(method, tensors):
                return args, kwargs
            placed = _placed(values, here, shard, "inputs")
            new_kwargs = {name: placed.pop(name) for name in kwargs}
            return parameters[method].unnamed(placed), new_kwargs

        def returned(output: Any) -> Any:
            checks.after()
            result = _placed(output, self.outputs, give_back, "output")
            if faster:
                faster.end()
            return result

        style = Style(as_given, returned)
        for method in self.methods:
            apply_style(module, method, style, _NO_GRAPH)
        return module

    def _sizes(self, tensor: Tensor, mesh: DeviceMesh, layout: Layout) -> ShardSizes:
        """The sizes to ask for, of the mesh dims that shard this tensor; others may have sizes for other tensors."""
        dims = {m: p.dim for m, p in enumerate(layout) if isinstance(p, Shard)}

        def of_dims(given: Mapping[Any, Any]) -> dict[int, Any]:
            return {m: each for key, each in given.items() if (m := mesh_dim_of(key, mesh)) in dims}

        if self.align != 1:
            multiples = of_dims(self.align) if isinstance(self.align, Mapping) else dict.fromkeys(dims, self.align)
            return {m: aligned_sizes(tensor.shape[dims[m]], n, mesh.size(m)) for m, n in multiples.items()}
        if isinstance(self.shard_sizes, Mapping):
            return of_dims(self.shard_sizes)
        return self.shard_sizes if dims else None

    def __repr__(self) -> str:
        options = inspect.signature(DomainParallel).parameters
        return f"DomainParallel({', '.join(f'{name}={getattr(self, name)!r}' for name in options)})"


class _Checks:
    """Compares what the ranks pass to a module, and the plain values that it used.

    In the first calls of its first layouts; with ``SHARDTENSOR_DEBUG=1`` in all.
    """

    _LAYOUTS = 16

    def __init__(self, what: str, mesh: DeviceMesh) -> None:
        self._what, self._mesh = what, mesh
        self._seen: Counter[Any] = Counter()
        self._due = False

    def before(self, method: str, given: Sequence[tuple[str, Tensor]]) -> None:
        """Check plain inputs, if this is one of the calls to check. Those to be made ShardTensors have names."""
        traced = any(is_traced(t._local_tensor if isinstance(t, DTensor) else t) for _, t in given)
        plain = [(name, t) for name, t in given if not isinstance(t, DTensor)]
        layout = (method, *((name, t.shape, t.dtype) for name, t in plain))
        self._due = self._mesh.size() > 1 and not traced and self._is_due(layout)
        if self._due and plain:
            lines = (f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in plain)
            record_over_mesh(f"{self._what}: {', '.join(lines)}", self._mesh)
            along = tuple(range(self._mesh.ndim))
            copies = [Copy(f"{name}, one of the {self._what},", t, along) for name, t in plain]
            compare("comparison of plain tensors", copies, self._mesh, exactly=False)

    def _is_due(self, layout: Any) -> bool:
        """Whether a call is one of these. Every rank asks, with the same layout."""
        if debug_enabled():
            return True
        if not wanted or (len(self._seen) >= self._LAYOUTS and layout not in self._seen):
            return False
        self._seen[layout] += 1
        return self._seen[layout] <= CALLS

    def after(self) -> None:
        """Check the weights that were used, and all that ranks have done: what leaves the module may never be read."""
        due, self._due = self._due, False
        if due:
            compare_histories("DomainParallel", self._mesh)


class _FasterWay:
    """Whether a call runs on shards or without, for ``when="auto"``.

    Small inputs take longer on shards than on one device: communication and the host's work do not shrink with them. So
    both ways are tried. Of the calls with inputs of these shapes, the second one on shards and the second one without
    are timed, results included, on the slowest rank, of which all ranks tell each other. The faster way is kept. The
    first calls make plans and fill caches. A call that takes long on shards is not tried without: one device may not
    hold it. Nothing is tried where gradients are recorded, because their backward pass is not seen here.
    """

    _TRIED = (False, False, True, True)  # without shards?
    _SECONDS = 0.1  # on shards, beyond which nothing is tried without
    _MOST = 64  # shapes; what comes later runs on shards

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self._name, self._mesh = name, mesh
        self._kept: dict[Any, bool] = {}
        self._times: dict[Any, list[float]] = {}
        self._key: Any = None
        self._started = 0.0

    def begin(self, method: str, given: Sequence[tuple[str, Tensor]]) -> bool:
        """Choose the way of a call; collective where times are compared."""
        self._key = None
        tensors = [t for _, t in given]
        if torch.is_grad_enabled() or not tensors or any(isinstance(t, DTensor) or is_traced(t) for t in tensors):
            return False
        if any(t.device.type != self._mesh.device_type for t in tensors):
            return False
        key = (method, *((tuple(t.shape), t.dtype) for t in tensors))
        if key not in self._kept and (key in self._times or len(self._times) < self._MOST):
            times = self._times.setdefault(key, [])
            self._compare(key, times)
            if key not in self._kept:
                self._key, self._started = key, self._now()
                return self._TRIED[len(times)]
        return self._kept.get(key, False)

    def _compare(self, key: Any, times: Sequence[float]) -> None:
        """Keep a way, where these times tell which."""
        if len(times) == 2 and self._slowest(times[1]) > self._SECONDS:
            self._kept[key] = False
        if len(times) == len(self._TRIED):
            on_shards, without = (self._slowest(times[i]) for i in (1, 3))
            self._kept[key] = without < on_shards
            method, *shapes = key
            _log.info(
                "%s.%s of %s runs %s shards: %.1f ms on shards, %.1f ms without",
                *(self._name, method, ", ".join(str(shape) for shape, _ in shapes)),
                *("without" if self._kept[key] else "on", on_shards * 1e3, without * 1e3),
            )

    def end(self) -> None:
        if self._key is not None:
            self._times[self._key].append(self._now() - self._started)
        self._key = None

    def _now(self) -> float:
        """When the device has done what it was given so far."""
        if self._mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks' seconds."""
        told = gather_over_mesh([round(seconds * 1e9)], self._mesh, "times of DomainParallel")
        return max(row[0] for row in told.values()) / 1e9


# -- layouts as they are given ----------------------------------------------------------------------------------------


def _normalized(what: str, layouts: Any) -> Layouts:
    """A tuple for a layout, a dict for layouts by name or by index."""
    if layouts is None:
        return None
    if isinstance(layouts, Placement):
        layouts = (layouts,)
    if isinstance(layouts, tuple) and layouts and all(isinstance(p, Placement) for p in layouts):
        if any(p.is_partial() for p in layouts):
            raise ValueError(f"{what}={layouts}: only Shard and Replicate")
        return layouts
    if isinstance(layouts, Mapping):
        return {name: _normalized(f"{what}[{name!r}]", own) for name, own in layouts.items()}
    if isinstance(layouts, list):
        return {i: _normalized(f"{what}[{i}]", own) for i, own in enumerate(layouts)}
    raise TypeError(
        f"{what}={layouts!r}: a placement, a tuple of one placement per mesh dim, a dict of layouts by name, a list of "
        "layouts by position, or None"
    )


def _check_mesh(what: str, layouts: Layouts, mesh: DeviceMesh) -> None:
    if isinstance(layouts, Mapping):
        for name, own in layouts.items():
            _check_mesh(f"{what}[{name!r}]", own, mesh)
    elif layouts is not None and len(layouts) != mesh.ndim:
        raise ValueError(
            f"{what}={layouts} has {len(layouts)} placements, and the mesh {tuple(mesh.shape)} has {mesh.ndim} dims; "
            "give one per mesh dim, or a list for layouts by position"
        )


class _Parameters:
    """The parameters of a module's method.

    Attributes:
        method: its name, after the module's class.
        signature: of it.
        positional: names of those that may be given by position.
        rest: the name of ``*args``; empty where there is none.
        others: names of keyword-only ones; None: any name, there are ``**kwargs``.
    """

    def __init__(self, method: str, signature: inspect.Signature) -> None:
        kinds: dict[Any, list[str]] = {}
        for p in signature.parameters.values():
            kinds.setdefault(p.kind, []).append(p.name)
        self.method, self.signature = method, signature
        self.positional = kinds.get(Parameter.POSITIONAL_ONLY, []) + kinds.get(Parameter.POSITIONAL_OR_KEYWORD, [])
        self.rest = kinds.get(Parameter.VAR_POSITIONAL, [""])[0]
        self.others = None if Parameter.VAR_KEYWORD in kinds else kinds.get(Parameter.KEYWORD_ONLY, [])

    def by_name(self, layouts: Layouts) -> Layouts:
        """Layouts by position as layouts by name; ValueError where there are no such parameters."""
        if not isinstance(layouts, Mapping):
            return layouts
        positions = [key for key in layouts if isinstance(key, int)]
        named = {self.positional[i]: layouts[i] for i in positions if i < len(self.positional)}
        further = {i - len(self.positional): layouts[i] for i in positions if i >= len(self.positional)}
        if further and not self.rest:
            raise ValueError(f"inputs has {len(positions)} layouts, and {self} takes fewer positional arguments")
        named |= {key: own for key, own in layouts.items() if not isinstance(key, int)}
        for name in named:
            if self.others is not None and name not in (*self.positional, self.rest, *self.others):
                raise ValueError(f"inputs names {name!r}, which {self} does not take")
        return {**named, self.rest: further} if further else named

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, in their order; TypeError where the method does not take them."""
        self.signature.bind(*args, **kwargs)
        named = dict(zip(self.positional, args, strict=False))
        rest = {self.rest: args[len(self.positional) :]} if self.rest else {}
        return {**named, **rest, **kwargs}

    def unnamed(self, named: dict[str, Any]) -> tuple[Any, ...]:
        """Positional arguments that were named."""
        rest = named.pop(self.rest, ())
        return (*named.values(), *rest)

    def __str__(self) -> str:
        names = [
            *self.positional,
            *([f"*{self.rest}"] if self.rest else []),
            *(["**kwargs"] if self.others is None else self.others),
        ]
        return f"{self.method}({', '.join(names)})"


# -- tensors in arguments and results ---------------------------------------------------------------------------------

Place = Callable[[Tensor, Layout], Tensor]


def _laid_out(tensor: Tensor, mesh: DeviceMesh, layout: Layout, sizes: ShardSizes) -> ShardTensor:
    if not isinstance(tensor, DTensor) and tensor.device.type != mesh.device_type:
        if not (tensor.requires_grad and torch.is_grad_enabled()):  # of the others only this rank's part is moved
            spec = ShardTensorSpec.make(mesh, layout, tensor.shape, tensor.dtype, shard_sizes=sizes)
            return wrap(own_part(tensor, spec), spec)
        tensor = tensor.to(mesh.device_type)
    sharded = ShardTensor.from_dtensor(tensor) if isinstance(tensor, DTensor) else promote(tensor, mesh)
    return sharded.redistribute(mesh, layout, shard_sizes=sizes)


def _placed(value: Any, layouts: Layouts, place: Place, name: str) -> Any:
    """``value`` with its tensors laid out; itself if nothing changes."""
    if layouts is None:
        return value
    if isinstance(layouts, tuple):
        return _placed_alike(value, layouts, place, name)
    parts = _parts(value)
    unknown = sorted(map(str, layouts.keys() - parts.keys()))
    if unknown:
        raise ValueError(f"{name}, a {type(value).__name__}, has no {', '.join(unknown)}, for which a layout is given")
    return _rebuilt(value, {key: _placed(parts[key], own, place, f"{name}[{key!r}]") for key, own in layouts.items()})


def _placed_alike(value: Any, layout: Layout, place: Place, name: str) -> Any:
    lacking: list[str] = []
    found = False

    def visit(part: Any, name: str) -> Any:
        nonlocal found
        if not isinstance(part, Tensor):
            return _rebuilt(part, {key: visit(inner, f"{name}[{key!r}]") for key, inner in _parts(part).items()})
        if any(isinstance(p, Shard) and not -part.ndim <= p.dim < part.ndim for p in layout):
            lacking.append(f"{name} {tuple(part.shape)}")
            return part
        found = True
        try:
            return place(part, layout)
        except ValueError as error:
            raise ValueError(f"{name} {tuple(part.shape)}: {error}") from error

    placed = visit(value, name)
    if lacking and not found:
        raise ValueError(
            f"{name}: no tensor has the dims that {layout} shards, only {', '.join(lacking)}; name other dims, or give "
            "layouts by name"
        )
    return placed


def _tensors(value: Any, layouts: Layouts, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a layout is for, with their names, also those that it leaves as they are."""
    if isinstance(value, Tensor) and layouts is not None:
        yield name, value
    elif layouts is not None:
        for key, part in _parts(value).items():
            own = layouts.get(key) if isinstance(layouts, Mapping) else layouts
            yield from _tensors(part, own, f"{name}[{key!r}]")


def _parts(value: Any) -> Mapping[Any, Any]:
    """What a container holds, by name or index; of any other object, the ShardTensors among its attributes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    held = {} if isinstance(value, (type, nn.Module)) else getattr(value, "__dict__", {})
    return {name: own for name, own in held.items() if isinstance(own, ShardTensor)}


def _rebuilt(value: Any, parts: Mapping[Any, Any]) -> Any:
    """A container like ``value`` with other parts; itself where all are what it holds already."""
    old = _parts(value)
    parts = {key: new for key, new in parts.items() if new is not old[key]}
    if not parts:
        return value
    if is_dataclass(value):
        return replace(value, **parts)  # type: ignore[type-var]
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        copied.update(parts)
        return copied
    if not isinstance(value, (list, tuple)):
        copied = copy.copy(value)
        vars(copied).update(parts)
        return copied
    items = {**old, **parts}.values()
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

"""``vmap`` of functions that meet ShardTensors: each rank maps over its own rows, or over one row after the other.

Rows of the mapped dim do not depend on each other. So if that dim is sharded, and nothing else is, torch's ``vmap`` of
each rank's rows gives that rank's rows of the result, and nothing is sent. The ranks share arguments that are not
mapped, and tensors that the function holds, such as weights: these get a contribution to their gradient from each rank.
Contributions to arguments are summed as those to other operators' weights. What the function holds is found in the
graph of its results, where gradients leave what it has computed, and is summed there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from .._compat import tree_flatten, tree_unflatten
from .._compat.functorch import batched_inputs, first_node_after, flattened_like, is_made_since
from ..communication.weight_gradients import GradientSum, start_sum
from ..context import Setting
from ..dispatch.tensor import ShardTensor, from_dtensor, from_part, promote, redistribute_to, to_part
from ..dispatch.transform_levels import InsideLevels
from ..errors import refuse
from ..layout.intervals import aligned_sizes
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from ..ranks.cuda_graphs import is_capturing

# Masks of attention are made of four maps inside each other: rows times columns of calls would take hours.
MAX_CALLS = 4096
_around = Setting(1, decides=False)  # calls of the function around this one
# ``out_dims``: one for all results, or nested as these are. None: a result that is not mapped.
Dims: TypeAlias = "int | Sequence[Dims] | Mapping[Any, Dims] | None"


class _Rows(NamedTuple):
    """How the mapped dim is sharded: on which dim of the mesh, if any, in which sizes."""

    mesh: DeviceMesh
    mesh_dim: int | None
    sizes: tuple[int, ...]

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        return () if self.mesh_dim is None else (self.mesh_dim,)

    def spec(self, shape: Sequence[int], dim: int, dtype: torch.dtype) -> ShardTensorSpec:
        """The spec of a tensor of this global shape, sharded so along ``dim``."""
        placements = [Shard(dim) if m == self.mesh_dim else Replicate() for m in range(self.mesh.ndim)]
        given = {} if self.mesh_dim is None else {self.mesh_dim: self.sizes}
        return ShardTensorSpec.make(self.mesh, placements, shape, dtype, shard_sizes=given)


def mapped(
    torchs: Callable[..., Any],
    func: Callable[..., Any],
    in_dims: int | tuple[Any, ...],
    out_dims: Dims,
    randomness: str,
    chunk_size: int | None,
    *args: object,
    **kwargs: object,
) -> Any:
    """``vmap(func, in_dims, out_dims, randomness, chunk_size)(*args, **kwargs)``; ``torchs`` is torch's."""
    n, dims, tensors, structure = batched_inputs(in_dims, args, func)
    if not n:
        raise refuse("vmap", tensors, "the mapped dim has no elements", "leave the call out")
    tensors = [from_dtensor(t) if isinstance(t, DTensor) else t for t in tensors]
    rows = _rows_of(dims, tensors)

    def map_rows(parts: Sequence[Any]) -> Any:
        given = tree_unflatten(list(parts), structure)
        # Ranks with other numbers of chunks would have other graphs, and sum other numbers of gradients.
        chunks = None if rows is not None and rows.mesh_dims else chunk_size
        return torchs(func, in_dims, out_dims, randomness, chunks, *given, **kwargs)

    def of_row(row: Sequence[Any]) -> Any:
        return func(*tree_unflatten(list(row), structure), **kwargs)

    if rows is not None and randomness != "different":
        try:
            return _own_rows(map_rows, rows, n, dims, out_dims, tensors)
        except Exception as error:
            if not met(error):
                raise
            # It holds a ShardTensor; nothing has been sent.
    return _one_by_one(of_row, n, dims, out_dims, randomness, tensors)


def met(error: Exception) -> bool:
    """Whether a function has met a ShardTensor inside of levels, or a DTensor, of whose operators these take some.

    What torch says of DTensors follows from operators and placements, so it is the same on all ranks.
    """
    said = ("DTensor", "sharding strategy registered")
    return isinstance(error, InsideLevels) or any(words in str(error) for words in said)


# -- each rank its own rows -------------------------------------------------------------------------------------------


def _rows_of(dims: Sequence[int | None], tensors: Sequence[Any]) -> _Rows | None:
    """How the mapped dim is sharded; None if another dim is, or nothing is a ShardTensor."""
    found: _Rows | None = None
    for dim, t in zip(dims, tensors, strict=True):
        if not isinstance(t, ShardTensor):
            continue
        if found is None:
            found = _Rows(t.device_mesh, None, ())
        for d, m in t._spec.sharded_dims().items():
            if d != dim or found.mesh_dim not in (None, m):
                return None
            if found.mesh_dim is None:
                found = _Rows(t.device_mesh, m, t._spec.sizes_along(m))
    return found


def _own_rows(
    map_rows: Callable[[Sequence[Any]], Any],
    rows: _Rows,
    n: int,
    dims: Sequence[int | None],
    out_dims: Dims,
    tensors: Sequence[Any],
) -> Any:
    """The result of ``map_rows``, which gets each rank's part of the tensors."""
    given = rows
    if 0 in rows.sizes:  # a rank without rows would have another graph than the others
        if n < len(rows.sizes):
            raise InsideLevels
        rows = rows._replace(sizes=aligned_sizes(n, 1, len(rows.sizes)))
    locals_ = _local_parts(rows, dims, tensors)
    borders = {t.grad_fn for t in locals_ if isinstance(t, Tensor) and t.grad_fn is not None}
    first_inside = first_node_after()
    with torch.autograd.set_multithreading_enabled(False):  # a device's thread numbers its nodes by itself
        results, out_structure = tree_flatten(map_rows(locals_))
    places: Any = flattened_like(out_dims, out_structure)
    _sum_what_is_held([t for t in results if isinstance(t, Tensor)], borders, first_inside, rows)
    complete = []
    for t, place in zip(results, places, strict=True):
        if not isinstance(t, Tensor) or place is None:
            if isinstance(t, Tensor) and t.requires_grad and rows.mesh_dims:
                reason = "a result with out_dims=None has a gradient, which each rank would add"
                raise refuse("vmap", tensors, reason, "return it from another function, which is not mapped")
            complete.append(t)
            continue
        place %= t.ndim
        spec = rows.spec((*t.shape[:place], n, *t.shape[place + 1 :]), place, t.dtype)
        made = from_part(t, spec)
        complete.append(made if given is rows else redistribute_to(made, given.spec(spec.shape, place, t.dtype)))
    return tree_unflatten(complete, out_structure)


def _local_parts(rows: _Rows, dims: Sequence[int | None], tensors: Sequence[Any]) -> list[Any]:
    """This rank's rows of what is mapped, and all of what is not, with gradients summed over the ranks."""
    result = list(tensors)
    shared = []
    for i, (dim, t) in enumerate(zip(dims, tensors, strict=True)):
        shared.append(dim is None and isinstance(t, Tensor) and not isinstance(t, ShardTensor))
        if dim is not None:
            t = promote(t, rows.mesh)
            t = redistribute_to(t, rows.spec(t.shape, dim, t.dtype))
            result[i] = to_part(t, t._spec)
        elif isinstance(t, ShardTensor):
            t = redistribute_to(t, t._spec.replicated())
            result[i] = to_part(t, t._spec.with_axes({m: AxisLayout(Partial()) for m in rows.mesh_dims}))
    if rows.mesh_dims and any(shared):
        result = GradientSum(rows.mesh, rows.mesh_dims, tuple(shared)).complete(result)
    return result


def _sum_what_is_held(results: Sequence[Tensor], borders: set[Any], first: int, rows: _Rows) -> None:
    """Have gradients summed where they leave what the function has computed for what it holds."""
    if not rows.mesh_dims:
        return
    nodes = [t.grad_fn for t in results if t.grad_fn is not None]
    if not all(is_made_since(node, first) for node in nodes):
        raise InsideLevels  # a result is what the function holds
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaving = []
        for i, (after, _) in enumerate(node.next_functions):
            if after is None or after in borders or after in seen:
                continue
            if is_made_since(after, first):
                seen.add(after)
                nodes.append(after)
            else:
                leaving.append(i)
        if leaving:
            node.register_hook(_summing(leaving, rows))


def _summing(leaving: Sequence[int], rows: _Rows) -> Callable[..., tuple[Tensor | None, ...]]:
    def hook(inputs: Sequence[Tensor | None], outputs: object) -> tuple[Tensor | None, ...]:
        sums = start_sum([inputs[i] for i in leaving], rows.mesh, rows.mesh_dims)()
        result = list(inputs)
        for i, total in zip(leaving, sums, strict=True):
            result[i] = total
        return tuple(result)

    return hook


# -- one row after the other ------------------------------------------------------------------------------------------


def _one_by_one(
    of_row: Callable[[Sequence[Any]], Any],
    n: int,
    dims: Sequence[int | None],
    out_dims: Dims,
    randomness: str,
    tensors: Sequence[Any],
) -> Any:
    """The results of ``of_row``, which gets a row of the tensors, together."""
    calls = _around.value * n
    if _around.value > 1 and calls > MAX_CALLS:
        reason = f"the function holds a ShardTensor, or is given one, and would be called {calls} times, one by one"
        raise refuse("vmap", tensors, reason, "let it hold plain tensors, such as a ShardTensor's full_tensor()")
    before = random_states()
    found: list[list[Any]] = []
    for i in range(n):
        row = [t if d is None else t.select(d, i) for d, t in zip(dims, tensors, strict=True)]
        if i and randomness == "same":
            for set_state, state in before:
                set_state(state)
        with _WithoutStatistics(), _around.set_to(calls):
            leaves, out_structure = tree_flatten(of_row(row))
        found.append(leaves)
        drawn = any(not torch.equal(p, q) for (_, p), (_, q) in zip(before, random_states(), strict=True))
        if drawn and randomness != "same":
            if randomness == "error":
                raise RuntimeError(
                    "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
                    "'different' randomness flags on vmap or perform the randomness operation out of vmap"
                )
            reason = "randomness='different' draws the numbers of all rows at once, and here rows go one by one"
            raise refuse("vmap", tensors, reason, "draw them before, and map over them, too")
    places = flattened_like(out_dims, out_structure)
    if places is None:
        raise ValueError(f"vmap: out_dims={out_dims} is not compatible with the structure of outputs, {out_structure}")
    complete = []
    for values, place in zip(zip(*found, strict=True), places, strict=True):
        if place is not None:
            complete.append(torch.stack(values, place))
        elif all(value is values[0] for value in values):
            complete.append(values[0])
        else:
            reason = "out_dims=None is for a result that does not depend on the row, which is not known here"
            raise refuse("vmap", tensors, reason, "leave out_dims=None out, and take the first row")
    return tree_unflatten(complete, out_structure)


class _WithoutStatistics(TorchFunctionMode):
    """Refuses what writes to running statistics: rows are mapped over at once, so none is before the other."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, F.instance_norm):
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            learns = given.arguments.get("training", given.arguments.get("use_input_stats"))
            if learns and given.arguments["running_mean"] is not None:
                reason = "it would write running statistics once for each row that vmap maps over"
                raise refuse(
                    func, args[0], reason, "call eval() of the module, or make it with track_running_stats=False"
                )
        return func(*args, **kwargs)


def random_states() -> list[tuple[Callable[[Tensor], Any], Tensor]]:
    """The states of the default generators that are in use, each with what sets it."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    modules: list[Any] = [torch] if kind is None else [torch, torch.get_device_module(kind)]
    return [(m.set_rng_state, m.get_rng_state()) for m in modules if getattr(m, "is_initialized", lambda: True)()]


def draws_are_captured() -> bool:
    """Whether random numbers are drawn for a CUDA graph now: their generator has no state then."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return kind is not None and is_capturing(kind)

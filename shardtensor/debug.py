"""``check``: compare values that have to be equal on all ranks.

Plain tensors, numbers and replicated DTensors have one value on all ranks. If a value differs, because of other seeds,
files or learning rates, the results are wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .layout.placements import given_mesh
from .ranks.agreement import check_same
from .ranks.equal_values import compare, copy_of, line_of

__all__ = ["check"]

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


def check(*values: Any, mesh: DeviceMesh | None = None) -> None:
    """Raise on all ranks if plain or replicated values differ between the ranks of a mesh.

    Collective over the mesh. The ranks compare tensors bit by bit, by digests computed on their device, and send only a
    few integers.

    Args:
        values: modules (parameters and buffers), optimizers (numbers such as ``lr`` of each group, and their state),
            tensors, numbers, strings, and lists, tuples and dicts of these. DTensors and ShardTensors are compared
            along the mesh dims on which they are replicated.
        mesh: default: that of the first DTensor among the values, or of the surrounding ``with mesh:``.

    Raises:
        ValueError: names, shapes, dtypes, numbers or the order of the values differ. The text shows those of each rank.
        RanksDiffer: tensors differ; the text names the first of them. Or the ranks have not done the same before.
        RuntimeError: no mesh is found.
        TypeError: a value of another type.

    Example::

        shardtensor.debug.check(model, optimizer, target, mesh=mesh["domain"])
    """
    leaves = list(chain.from_iterable(_leaves(value, _name(value, i)) for i, value in enumerate(values)))
    if mesh is None:
        held = next((t for _, t in leaves if isinstance(t, DTensor)), None)
        mesh = None if held is None else held.device_mesh
    mesh = given_mesh(mesh)
    lines = [line_of(name, t) if isinstance(t, Tensor) else f"{name} = {t!r}" for name, t in leaves]
    check_same("values", lines, mesh)
    compare("debug.check", [copy_of(name, t, mesh) for name, t in leaves if isinstance(t, Tensor)], mesh, exactly=True)


def _name(value: Any, i: int) -> str:
    return "" if isinstance(value, nn.Module) else f"{type(value).__name__} {i}"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and strings with their names."""
    if isinstance(value, nn.Module):
        for path, tensor in chain(value.named_parameters(), value.named_buffers()):
            yield f"{name}.{path}".lstrip("."), tensor
    elif isinstance(value, Optimizer):
        for i, group in enumerate(value.param_groups):
            options = {key: option for key, option in group.items() if key != "params"}
            yield from _leaves(options, f"{name}, group {i}")
            for j, parameter in enumerate(group["params"]):
                yield from _leaves(value.state.get(parameter, {}), f"{name}, state of parameter {j} of group {i}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}, {key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}[{i}]")
    elif isinstance(value, (Tensor, *_NUMBERS)):
        yield name, value
    else:
        raise TypeError(
            f"{name}: check takes modules, optimizers, tensors, numbers and strings, not {type(value).__name__}"
        )

"""A warning where every rank does the same work in the first call of a style's method, and nothing else would say so.

A network whose results are right may still gain nothing from shards: if a layout becomes ``Replicate()`` on the way,
every rank computes all that follows. :func:`shardtensor.observe.explain` counts all of it beforehand. In a program that
did not ask, this module looks at what costs nothing: the layouts of the inputs and outputs of convolutions and linear
layers, which are the same on all ranks. Hooks take them in the first call. From then on the modules have no hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._compat import is_compiled, is_traced
from ..dispatch.tensor import ShardTensor
from ..layout.spec import ShardTensorSpec

_COUNTED = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_TOLERATED = 1.2  # a rank's work, divided by its part
_MATTERS = 0.05  # of the repeated work: what is less is not where it begins


class _Layer(NamedTuple):
    """A call of a convolution or of a linear layer.

    Attributes:
        work: its products of numbers.
        operand, result: their layouts; None: a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    work: int
    operand: ShardTensorSpec | None
    result: ShardTensorSpec | None

    def is_repeated(self, mesh_dim: int) -> bool:
        """Whether all ranks along a mesh dim do all of it."""
        specs = [spec for spec in (self.operand, self.result) if spec is not None]
        return all(spec.placements[mesh_dim].is_replicate() for spec in specs)


class RepeatedWork:
    """Looks at one call of a method.

    Args:
        module: whose method it is.
        method: what the warning calls it.
    """

    def __init__(self, module: nn.Module, method: str) -> None:
        self._method = method
        self._layers: list[_Layer] = []
        self._hooks: list[RemovableHandle] = []
        modules = dict(module.named_modules())
        if not any(map(is_compiled, modules.values())):  # hooks would become a part of its graphs
            for name, each in modules.items():
                if isinstance(each, _COUNTED):
                    self._hooks.append(each.register_forward_hook(self._noting(name or type(each).__name__)))

    def _noting(self, name: str) -> Any:
        def note(layer: Any, args: tuple[Any, ...], output: Any) -> None:
            x = args[0] if args else None
            if not isinstance(x, Tensor) or not isinstance(output, Tensor) or is_traced(_local(output)):
                return
            weight = layer.weight
            # A weight's first dim is the outputs', in transposed convolutions the inputs'.
            per_number = weight.numel() // max(1, weight.shape[0])
            each = x if getattr(layer, "transposed", False) else output
            specs = [t._spec if isinstance(t, ShardTensor) else None for t in (x, output)]
            self._layers.append(_Layer(name, tuple(x.shape), each.numel() * per_number, *specs))

        return note

    def end(self) -> None:
        """Take the hooks away; warn where the method was called on shards, and ranks did too much alike."""
        while self._hooks:
            self._hooks.pop().remove()
        layers, self._layers = self._layers, []
        specs = [spec for layer in layers for spec in (layer.operand, layer.result) if spec is not None]
        sharded = {(spec.mesh, m) for spec in specs for m in spec.sharded_dims().values()}
        for mesh, m in sorted(sharded, key=lambda pair: pair[1]):
            own = [layer for layer in layers if all(s is None or s.mesh == mesh for s in (layer.operand, layer.result))]
            self._warn(own, m, mesh.size(m))

    def _warn(self, layers: Sequence[_Layer], mesh_dim: int, ranks: int) -> None:
        repeated = [layer for layer in layers if layer.is_repeated(mesh_dim)]
        work = sum(layer.work for layer in repeated)
        if not work:
            return
        part = work / sum(layer.work for layer in layers)
        times = 1 + (ranks - 1) * part
        if times <= _TOLERATED:
            return
        first = next(layer for layer in repeated if layer.work >= _MATTERS * work)
        operand = "a plain tensor" if first.operand is None else f"not sharded along mesh dim {mesh_dim}"
        warnings.warn(
            f"{self._method}: all {ranks} ranks along mesh dim {mesh_dim} do {part:.0%} of the work of convolutions "
            f"and linear layers alike, so each has {times:.2f} times its part of the work. The first of these layers "
            f"is {first.name}, whose input {first.shape} is {operand}. Results are right, but more ranks gain little. "
            "Where this begins, and what keeps the work divided: python -m shardtensor explain --share",
            stacklevel=2,
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor

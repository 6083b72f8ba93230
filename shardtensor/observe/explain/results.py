"""What a preview says: layers, what each of them costs each rank, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from ..counting import Communication

PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Share:
    """What a layer costs one rank.

    Attributes:
        outputs: shapes of its local results.
        output_bytes: their size.
        saved_bytes: what the layer keeps for the backward pass: memory that neither an earlier layer keeps nor weights
            or inputs have. 0 where nothing requires a gradient.
        flops: floating-point operations of products and convolutions in the forward pass, and in the backward pass.
        forward, backward: what is communicated, as :func:`shardtensor.testing.count_communication` counts it.
    """

    outputs: tuple[tuple[int, ...], ...]
    output_bytes: int
    saved_bytes: int
    flops: tuple[int, int]
    forward: Communication
    backward: Communication

    @property
    def messages(self) -> int:
        """Messages sent in both passes."""
        return self.forward.messages + self.backward.messages

    @property
    def collectives(self) -> int:
        """Collectives in both passes, without all-to-alls: these are messages."""
        both = self.forward.collectives + self.backward.collectives
        return sum(n for kind, n in both.items() if kind != "all_to_all")

    @property
    def bytes_sent(self) -> int:
        """Their bytes: of messages, and of this rank's operands of collectives."""
        return sum(each.bytes_sent + each.collective_bytes for each in (self.forward, self.backward))


@dataclass(frozen=True)
class Layer:
    """One call of an operator.

    Attributes:
        path: of the module that calls it, "" for the model itself.
        module: that module's class; "" where the model is no module.
        operator: its name.
        shapes: of its global results.
        layout: how these are sharded, "" where they are plain.
        shares: by rank.
        refused: the error's text with its remedy, "" where it is not refused.
    """

    path: str
    module: str
    operator: str
    shapes: tuple[tuple[int, ...], ...]
    layout: str
    shares: dict[int, Share]
    refused: str = ""

    @property
    def work(self) -> dict[int, int]:
        """By rank, how much it computes: floating-point operations, or elements where none are counted."""
        flops = {rank: sum(share.flops) for rank, share in self.shares.items()}
        if any(flops.values()):
            return flops
        return {rank: sum(map(math.prod, share.outputs)) for rank, share in self.shares.items()}

    @property
    def imbalance(self) -> float:
        """The largest rank's work by the mean of all that were run; 1.0 is balanced."""
        return imbalance(self.work)

    @property
    def matters(self) -> bool:
        """Whether it communicates, keeps memory, computes products or is refused; views and the like do not."""
        shares = self.shares.values()
        return bool(self.refused) or any(s.messages or s.collectives or s.saved_bytes or any(s.flops) for s in shares)


@dataclass(frozen=True)
class Explanation:
    """What a model would do on the ranks of a mesh. ``print`` shows a table.

    Attributes:
        mesh: its shape.
        inputs: a line for each tensor input: shape, dtype and layout.
        ranks: those that were run, all of them or a sample.
        layers: in the order of their calls.
        modules: by path the class of each module of the model.
        weight_bytes: of parameters and buffers, which each rank holds whole.
        input_bytes: by rank, of the inputs.
        differentiated: whether a backward pass was run.
        stopped: why the run ended before its end, "" where it did not.
        notes: what is to be known about the numbers.
    """

    mesh: tuple[int, ...]
    inputs: tuple[str, ...]
    ranks: tuple[int, ...]
    layers: tuple[Layer, ...]
    modules: dict[str, str]
    weight_bytes: int
    input_bytes: dict[int, int]
    differentiated: bool
    stopped: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def refused(self) -> tuple[Layer, ...]:
        """The layers that are refused."""
        return tuple(layer for layer in self.layers if layer.refused)

    def communication(self, rank: int, phase: str = "forward") -> Communication:
        """All that a rank communicates in a phase, "forward" or "backward".

        Raises:
            ValueError: a rank that was not run, or another phase.
        """
        if rank not in self.ranks or phase not in PHASES:
            raise ValueError(f"rank {rank}, {phase!r}: the ranks {list(self.ranks)} and the phases {PHASES} are known")
        return reduce(add, (getattr(layer.shares[rank], phase) for layer in self.layers), Communication())

    def total(self, rank: int, what: str) -> int:
        """A rank's sum over all layers of an attribute of :class:`Share`, such as "saved_bytes"."""
        return sum(getattr(layer.shares[rank], what) for layer in self.layers)

    def flops(self, rank: int) -> int:
        """A rank's floating-point operations of products and convolutions, in both passes."""
        return sum(sum(layer.shares[rank].flops) for layer in self.layers)

    def __str__(self) -> str:
        from .report import as_text

        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, numbers and strings, for ``json.dumps``."""
        from .report import as_dict

        return as_dict(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """The page, complete in itself; written to ``path`` if one is given."""
        from .page import as_page

        page = as_page(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


def imbalance(work: dict[int, int]) -> float:
    """The largest by the mean; 1.0 where there is none."""
    total = sum(work.values())
    return max(work.values()) * len(work) / total if total else 1.0

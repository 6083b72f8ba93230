"""What a preview knows of a layer: what it costs each rank, and what it would cost one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..counting import Communication


@dataclass(frozen=True)
class Share:
    """What a layer costs one rank.

    Attributes:
        outputs: shapes of its local results.
        output_bytes: their size.
        saved_bytes: memory that the layer keeps for the backward pass, without that of earlier layers, weights and
            inputs. 0 if nothing requires a gradient.
        flops: floating-point operations of products, convolutions and attention in the forward pass, and in the
            backward pass; none of natten's kernels.
        forward, backward: the communication, as :func:`shardtensor.testing.count_communication` counts it.
        rows, other_rows: the number of rows of other ranks that the layer reads by a sharded index, and the number of
            rows that those ranks have.
    """

    outputs: tuple[tuple[int, ...], ...]
    output_bytes: int
    saved_bytes: int
    flops: tuple[int, int]
    forward: Communication
    backward: Communication
    rows: int = 0
    other_rows: int = 0

    @property
    def messages(self) -> int:
        """Messages sent in both passes."""
        return self.forward.messages + self.backward.messages

    @property
    def collectives(self) -> int:
        """Collectives in both passes, except all-to-alls, which count as messages."""
        both = self.forward.collectives + self.backward.collectives
        return sum(n for kind, n in both.items() if kind != "all_to_all")

    @property
    def bytes_sent(self) -> int:
        """Bytes of messages, and of this rank's operands of collectives."""
        return sum(each.bytes_sent + each.collective_bytes for each in (self.forward, self.backward))


@dataclass(frozen=True)
class Layer:
    """One call of an operator.

    Attributes:
        path: the path of the module that calls it; "" for the model itself.
        module: the class of that module; "" if the model is a function.
        operator: the name of the operator.
        shapes: the shapes of its global results.
        layout: the layout of the results; "" if they are plain.
        shares: the share of each rank, by rank.
        refused: the text of the refusal with its remedy; "" if the operator is not refused.
        operands: shape and layout of each ShardTensor among its operands.
        whole: the share of one process that has the global tensors; None if the model reads values.
    """

    path: str
    module: str
    operator: str
    shapes: tuple[tuple[int, ...], ...]
    layout: str
    shares: dict[int, Share]
    refused: str = ""
    operands: tuple[str, ...] = ()
    whole: Share | None = None

    @property
    def name(self) -> str:
        """The path of the module and the operator."""
        return f"{self.path} {self.operator}".strip()

    @property
    def work(self) -> dict[int, int]:
        """The work of each rank: floating-point operations, or elements if no operations are counted."""
        flops = {rank: sum(share.flops) for rank, share in self.shares.items()}
        if any(flops.values()):
            return flops
        return {rank: sum(map(math.prod, share.outputs)) for rank, share in self.shares.items()}

    @property
    def imbalance(self) -> float:
        """The largest work of a rank divided by the mean of all ranks that were run; 1.0 is balanced."""
        return imbalance(self.work)

    @property
    def matters(self) -> bool:
        """Whether it communicates, keeps memory, computes products or is refused, unlike views."""
        shares = self.shares.values()
        return bool(self.refused) or any(s.messages or s.collectives or s.saved_bytes or any(s.flops) for s in shares)


def imbalance(work: Mapping[int, float]) -> float:
    """The largest by the mean; 1.0 where there is none."""
    total = sum(work.values())
    return max(work.values()) * len(work) / total if total else 1.0

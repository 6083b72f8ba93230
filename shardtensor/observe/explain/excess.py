"""How far a rank is from its part of the work: what is computed and kept on every rank alike, and where that begins.

Ideally a rank that has a half of the input computes a half of what one process does, and keeps a half of its memory. It
does more where halos overlap, and all of it where a layout has become ``Replicate()``: from there on every rank repeats
the same work. The counts of one process are those of the same run without shards, call by call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .layers import Layer, Share, imbalance

_ALL = 0.95  # of what one process computes: a rank that does so much of it does all
_MATTERS = 0.05  # of the network's work: what is less is not worth a line
_HIGH = 1.1  # of a rank's part: what is less is not worth a line
_UNEVEN = 1.5  # the largest shard, as a multiple of an even one


class Excess(NamedTuple):
    """What the busiest rank does, divided by its part of what one process does. 1.0 is ideal.

    Attributes:
        work: of floating-point operations of products and convolutions, in both passes.
        kept: of memory that is kept for the backward pass.
    """

    work: float
    kept: float

    def __str__(self) -> str:
        return f"work {self.work:.2f}, kept memory {self.kept:.2f}"


def _flops(share: Share) -> float:
    return sum(share.flops)


def _kept(share: Share) -> float:
    return share.saved_bytes


def _of_one(layers: Iterable[Layer], cost: Callable[[Share], float]) -> float:
    """What one process has of some layers."""
    return sum(cost(layer.whole) for layer in layers if layer.whole is not None)


def _ratio(parts: dict[int, float], layers: Sequence[Layer], cost: Callable[[Share], float]) -> float:
    """Of the rank that is furthest from its part; 1.0 where one process has nothing of it."""
    whole = _of_one(layers, cost)
    ratios = (sum(cost(layer.shares[r]) for layer in layers) / (whole * part) for r, part in parts.items() if part)
    return max(ratios, default=1.0) if whole else 1.0


def excess_of(layers: Sequence[Layer], parts: dict[int, float]) -> Excess:
    """Of some layers of a preview; ``parts``: how much of the input each rank has."""
    return Excess(_ratio(parts, layers, _flops), _ratio(parts, layers, _kept))


def uneven_input(parts: dict[int, float]) -> list[str]:
    """A line where the input itself has uneven shards: no rank can do its part of the work then."""
    largest = imbalance(parts)
    return [f"    The largest part of the input is {largest:.2f} times an even part."] if largest > _HIGH else []


def by_module(layers: Sequence[Layer], parts: dict[int, float]) -> list[tuple[str, Excess]]:
    """The modules that are far from their part, outer ones first, of those that matter."""
    all_work, all_kept = _of_one(layers, _flops), _of_one(layers, _kept)
    result: dict[str, Excess] = {}
    for path in dict.fromkeys(path for layer in layers for path in _outer(layer.path)):
        inside = [layer for layer in layers if f"{layer.path}.".startswith(f"{path}.")]
        excess = excess_of(inside, parts)
        matters = _of_one(inside, _flops) > _MATTERS * all_work or _of_one(inside, _kept) > _MATTERS * all_kept
        around = result.get(path.rpartition(".")[0])  # one line for both where its own is no other
        if matters and max(excess) > max(_HIGH, 1.05 * max(around or (0.0,))):
            result[path] = excess
    return list(result.items())


def _outer(path: str) -> Iterable[str]:
    """The module and those that it is in, up to three levels."""
    names = path.split(".") if path else []
    return (".".join(names[:n]) for n in range(1, min(len(names), 3) + 1))


def repeated(layers: Sequence[Layer], parts: dict[int, float]) -> str:
    """Where work begins that every rank repeats, why, and what would keep it divided; "" if it is little."""
    if max(parts.values(), default=1.0) > _ALL:
        return ""  # one rank has nearly all of the input
    total, same = _of_one(layers, _flops), [i for i, layer in enumerate(layers) if _is_repeated(layer)]
    work = _of_one([layers[i] for i in same], _flops)
    if not same or work < _MATTERS * total:
        return ""
    first = layers[same[0]]
    text = f"{work / total:.0%} of the work is done on every rank alike, from {first.name} on."
    sources = [layer for layer in layers[: same[0] + 1] if _gathers(layer)]
    if not sources:
        reason = f"Its operands are not sharded: {'; '.join(first.operands) or 'they are plain tensors'}."
        remedy = "Shard what they are computed from: list it in shard=, or redistribute it to shard its longest dim."
        return "\n    ".join([text, reason, remedy])
    source = sources[-1]
    shape = max(source.shapes, key=len)
    longest = max(range(len(shape)), key=lambda d: shape[d]) if shape else 0
    return "\n    ".join(
        [
            text,
            f"{source.name} gives {source.layout}, {tuple(shape)}, of",
            f"{'; '.join(source.operands)}:",
            "all ranks have all of it. Shard another dim of its operands, or",
            f"redistribute its result, e.g. to Shard({longest}).",
        ]
    )


def uneven(layers: Sequence[Layer], parts: dict[int, float]) -> str:
    """Where shards become very uneven, so that one rank does most of the work; "" if little is done with such."""
    total = _of_one(layers, _flops)
    if not total or _ratio(parts, layers, _flops) <= _HIGH:
        return ""
    for i, layer in enumerate(layers):
        shards = {rank: sum(map(math.prod, share.outputs)) for rank, share in layer.shares.items()}
        if imbalance(shards) > _UNEVEN * imbalance(parts):  # inputs have the shards that the caller wants
            work = _of_one([each for each in layers[i:] if layer.layout in "; ".join(each.operands)], _flops)
            if work > _MATTERS * total:
                shape = max(layer.shapes, key=len)
                return "\n    ".join(
                    [
                        f"{work / total:.0%} of the work is done with shards of very different sizes.",
                        f"{layer.name} gives {layer.layout}, {tuple(shape)}, of",
                        f"{'; '.join(layer.operands)}.",
                        'Redistribute its result: redistribute(shard_sizes="even").',
                    ]
                )
    return ""


def _is_repeated(layer: Layer) -> bool:
    """Whether every rank does (nearly) all that one process does in a layer."""
    if layer.whole is None or not _flops(layer.whole):
        return False
    return all(_flops(share) >= _ALL * _flops(layer.whole) for share in layer.shares.values())


def _gathers(layer: Layer) -> bool:
    """Whether sharded operands give a result of which every rank has all."""
    return "S(" in "".join(layer.operands) and bool(layer.layout) and "S(" not in layer.layout and any(layer.shapes)

"""A preview as text, and as what JSON can hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from .results import PHASES, Explanation, Layer, imbalance

_WIDTH = 20  # of a bar, in characters


def as_text(found: Explanation) -> str:
    """The inputs, a table of layers, one of ranks, what is refused, and notes."""
    world = "x".join(map(str, found.mesh))
    passes = "forward and backward" if found.differentiated else "forward"
    parts = [
        f"mesh {world}, {passes}; weights {bytes_text(found.weight_bytes)} on each rank",
        *(f"input {text}" for text in found.inputs),
        "",
        table(_LAYER_COLUMNS, (_layer_line(layer) for layer in found.layers if layer.matters)),
        "",
        table(_RANK_COLUMNS, _rank_lines(found)),
    ]
    parts += [f"\nrefused in {_name(layer)}: {layer.refused}" for layer in found.refused]
    if found.stopped:
        parts.append(f"\nThe run ended early: {found.stopped}")
    parts += [f"\n{note}" for note in found.notes]
    return "\n".join(parts)


_LAYER_COLUMNS = ("layer", "result", "layout", "messages", "collectives", "sent", "kept", "GFLOP", "max/mean")
_RANK_COLUMNS = ("rank", "input", "kept", "messages", "collectives", "sent", "GFLOP", "work")


def _layer_line(layer: Layer) -> tuple[str, ...]:
    """What the ranks with most of it have."""
    shares = layer.shares.values()
    flops = max(sum(share.flops) for share in shares)
    return (
        _name(layer),
        shape_text(layer.shapes),
        "REFUSED" if layer.refused else layer.layout,
        _number(max(share.messages for share in shares)),
        _number(max(share.collectives for share in shares)),
        bytes_text(max(share.bytes_sent for share in shares)),
        bytes_text(max(share.saved_bytes for share in shares)),
        f"{flops / 1e9:.3g}" if flops else "",
        f"{layer.imbalance:.2f}",
    )


def _rank_lines(found: Explanation) -> Iterable[tuple[str, ...]]:
    flops = {rank: found.flops(rank) for rank in found.ranks}
    most = max(flops.values())
    for rank in found.ranks:
        yield (
            str(rank),
            bytes_text(found.input_bytes[rank]),
            bytes_text(found.total(rank, "saved_bytes")),
            _number(found.total(rank, "messages")),
            _number(found.total(rank, "collectives")),
            bytes_text(found.total(rank, "bytes_sent")),
            f"{flops[rank] / 1e9:.3g}",
            bar(flops[rank], most),
        )


def as_dict(found: Explanation) -> dict[str, Any]:
    """See :meth:`Explanation.to_dict`."""
    result = asdict(found)
    result["balance"] = {rank: found.flops(rank) for rank in found.ranks}
    result["imbalance"] = imbalance(result["balance"])
    result["totals"] = {
        rank: {phase: asdict(found.communication(rank, phase)) for phase in PHASES}
        | {"saved_bytes": found.total(rank, "saved_bytes")}
        for rank in found.ranks
    }
    for layer, own in zip(found.layers, result["layers"]):
        own["imbalance"] = layer.imbalance
    written: dict[str, Any] = _with_text_keys(result)
    return written


def _with_text_keys(value: Any) -> Any:
    """The value with the keys that JSON has, and lists for tuples."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(own) for key, own in value.items()}
    return [_with_text_keys(own) for own in value] if isinstance(value, (list, tuple)) else value


# -- how things are written -------------------------------------------------------------------------------------------


def _name(layer: Layer) -> str:
    return f"{layer.path} {layer.operator}".strip()


def shape_text(shapes: Sequence[Sequence[int]]) -> str:
    """``"1x8x1350x2700"``; several results are separated by commas."""
    return ", ".join("x".join(map(str, shape)) or "()" for shape in shapes)


def bytes_text(n: int) -> str:
    """``"1.5 MiB"``; nothing for 0."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return "" if not n else f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _number(n: int) -> str:
    return str(n) if n else ""


def bar(value: float, most: float) -> str:
    """A bar of at most 20 characters."""
    return "#" * round(_WIDTH * value / most) if most else ""


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need, numbers on the right."""
    rows = [tuple(columns), *map(tuple, lines)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = {i for i, name in enumerate(columns) if name in ("layer", "result", "layout", "work", "choice")}

    def line(row: Sequence[str]) -> str:
        cells = (cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, rows[1:])])

"""A preview as text, and as what JSON can hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from html import escape
from operator import add
from pathlib import Path
from typing import Any

from ..counting import Communication
from .excess import Excess, by_module, excess_of, repeated, uneven, uneven_input
from .layers import Layer, imbalance

# -- results -----------------------------------------------------------------------------------------------------------

# What a preview says: layers, what each of them costs each rank, and what is refused.

PHASES = ("forward", "backward")

_COPIES = 4  # of the weights in a training step: weights, gradients, two states of AdamW


@dataclass(frozen=True)
class Explanation:
    """The preview of a model on the ranks of a mesh. ``print`` shows a table.

    Attributes:
        mesh: the shape of the mesh.
        inputs: a line for each tensor input: shape, dtype and layout.
        ranks: the ranks that were run, all or a sample.
        layers: the layers, in the order of their calls. Ranks sum the gradients of several weights in one collective;
            the layer "gradients of weights" has the last of these, and other layers have the rest.
        modules: the class of each module of the model, by path.
        weight_bytes: bytes of parameters and buffers, which are replicated.
        input_bytes: bytes of the inputs, by rank.
        differentiated: whether a backward pass was run.
        stopped: the reason if the run ended early; otherwise "".
        notes: notes about the numbers.
        parts: how much of the sharded inputs each rank has, from 0 to 1; empty without a comparison with one process.
        not_compared: why there is no comparison with one process; otherwise "".
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
    parts: dict[int, float] = field(default_factory=dict)
    not_compared: str = ""

    @property
    def excess(self) -> Excess | None:
        """What the busiest rank computes and keeps, divided by its part of what one process does; 1.0 is ideal.

        None without a comparison; :attr:`not_compared` says why.
        """
        return excess_of(self.layers, self.parts) if self.parts else None

    def share(self) -> str:
        """Return a line for the model, one for each module that is far from its part, and where repeated work begins,
        or work on very uneven shards.

        The numbers are those of :attr:`excess`.
        """
        if not self.parts:
            return f"not compared with one process: {self.not_compared}"
        lines = [f"1.0 is a rank's part of the input: {self.excess}"]
        lines += uneven_input(self.parts)
        lines += [f"    {path}: {excess}" for path, excess in by_module(self.layers, self.parts)]
        return "\n".join([*lines, *filter(None, (tell(self.layers, self.parts) for tell in (repeated, uneven)))])

    @property
    def refused(self) -> tuple[Layer, ...]:
        """The layers that are refused."""
        return tuple(layer for layer in self.layers if layer.refused)

    def communication(self, rank: int, phase: str = "forward") -> Communication:
        """Return the communication of a rank in a phase, "forward" or "backward".

        Raises:
            ValueError: a rank that was not run, or another phase.
        """
        if rank not in self.ranks or phase not in PHASES:
            raise ValueError(f"rank {rank}, {phase!r}: the ranks {list(self.ranks)} and the phases {PHASES} are known")
        return reduce(add, (getattr(layer.shares[rank], phase) for layer in self.layers), Communication())

    def total(self, rank: int, what: str) -> int:
        """Return a rank's sum over all layers of an attribute of :class:`Share`, such as "saved_bytes"."""
        return sum(getattr(layer.shares[rank], what) for layer in self.layers)

    def memory(self, rank: int) -> int:
        """Return the bytes that a rank holds: weights and inputs, and in a training step what is kept for the backward
        pass, gradients, and the two states of AdamW for each weight. Temporary memory is not counted.
        """
        copies = _COPIES if self.differentiated else 1
        return copies * self.weight_bytes + self.input_bytes[rank] + self.total(rank, "saved_bytes")

    def flops(self, rank: int) -> int:
        """Return a rank's floating-point operations of products and convolutions, in both passes."""
        return sum(sum(layer.shares[rank].flops) for layer in self.layers)

    def __str__(self) -> str:
        """The inputs, a table of layers, one of ranks, what is refused, and notes."""
        world = "x".join(map(str, self.mesh))
        passes = "forward and backward" if self.differentiated else "forward"
        parts = [
            f"mesh {world}, {passes}; weights {bytes_text(self.weight_bytes)} on each rank",
            *(f"input {text}" for text in self.inputs),
            "",
            _layer_table([layer for layer in self.layers if layer.matters]),
            "",
            table(_RANK_COLUMNS, _rank_lines(self)),
        ]
        if self.differentiated:
            most = bytes_text(max(map(self.memory, self.ranks)))
            parts += [
                f"\nA training step with AdamW holds up to {most} on a rank: inputs, kept",
                f"memory, and {_COPIES} times the weights (weights, gradients, two states). Temporary",
                "memory is not counted.",
            ]
        if self.parts:
            parts += ["", self.share()]
        parts += [f"\nrefused in {layer.name}: {layer.refused}" for layer in self.refused]
        if self.stopped:
            parts.append(f"\nThe run ended early: {self.stopped}")
        parts += [f"\n{note}" for note in self.notes]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings, for ``json.dumps``."""
        result = asdict(self)
        result["balance"] = {rank: self.flops(rank) for rank in self.ranks}
        result["imbalance"] = imbalance(result["balance"])
        result["excess"] = None if self.excess is None else self.excess._asdict()
        result["totals"] = {
            rank: {phase: asdict(self.communication(rank, phase)) for phase in PHASES}
            | {"saved_bytes": self.total(rank, "saved_bytes")}
            for rank in self.ranks
        }
        for layer, own in zip(self.layers, result["layers"]):
            own["imbalance"] = layer.imbalance
        written: dict[str, Any] = _with_text_keys(result)
        return written

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        return f'<iframe srcdoc="{escape(self.to_html())}" width="100%" height="600"></iframe>'

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the HTML page, and write it to ``path`` if given. Its template is page.html."""
        try:
            from jinja2 import Environment, StrictUndefined
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("to_html() writes its page with jinja2: pip install shardtensor[html]") from error
        templates = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
        templates.filters |= {"bytes": bytes_text, "shapes": shape_text, "giga": lambda n: f"{n / 1e9:.3g}"}
        page = templates.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
        most = max(map(self.flops, self.ranks)) or 1
        text: str = page.render(found=self, model=_tree(self), most=most, collectives=_collectives, imbalance=imbalance)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


# -- report ------------------------------------------------------------------------------------------------------------

_WIDTH = 20  # of a bar, in characters


def _layer_table(layers: Sequence[Layer]) -> str:
    """With a column of rows, where some are read by index."""
    lines = [_layer_line(layer) for layer in layers]
    if not any(share.rows for layer in layers for share in layer.shares.values()):
        return table(_LAYER_COLUMNS, lines)
    return table((*_LAYER_COLUMNS, "rows read"), [(*line, _rows(layer)) for line, layer in zip(lines, layers)])


def _rows(layer: Layer) -> str:
    """Of the rank that reads most: how many rows, and how many other ranks have."""
    most = max(layer.shares.values(), key=lambda share: share.rows)
    return f"{most.rows} of {most.other_rows}" if most.rows else ""


_LAYER_COLUMNS = ("layer", "result", "layout", "messages", "collectives", "sent", "kept", "GFLOP", "max/mean")
_RANK_COLUMNS = ("rank", "input", "kept", "messages", "collectives", "sent", "GFLOP", "work")


def _layer_line(layer: Layer) -> tuple[str, ...]:
    """What the ranks with most of it have."""
    shares = layer.shares.values()
    flops = max(sum(share.flops) for share in shares)
    return (
        layer.name,
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


def _with_text_keys(value: Any) -> Any:
    """The value with the keys that JSON has, and lists for tuples."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(own) for key, own in value.items()}
    return [_with_text_keys(own) for own in value] if isinstance(value, (list, tuple)) else value


# -- how things are written -------------------------------------------------------------------------------------------


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


# -- page --------------------------------------------------------------------------------------------------------------

# A preview as one HTML page that needs nothing else: modules that fold, operators that can be sorted.


def _collectives(found: Explanation, rank: int) -> str:
    """All of a rank's, by kind, without all-to-alls: these are messages."""
    forward, backward = (found.communication(rank, phase).collectives for phase in PHASES)
    counts = forward + backward
    kinds = sorted(kind for kind in counts if kind != "all_to_all")
    return ", ".join(f"{counts[kind]} {kind.replace('_', '-')}" for kind in kinds)


@dataclass
class _Module:
    """A module with its operators and the modules in it."""

    name: str
    kind: str = ""
    layers: list[Layer] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    def all_layers(self) -> list[Layer]:
        return self.layers + [layer for child in self.children.values() for layer in child.all_layers()]

    @property
    def work(self) -> dict[int, int]:
        """By rank, how much all of it computes: floating-point operations, or elements where none are counted."""
        layers = self.all_layers()
        ranks = layers[0].shares if layers else {0: None}
        flops = {rank: sum(sum(layer.shares[rank].flops) for layer in layers) for rank in ranks}
        return flops if any(flops.values()) else {rank: sum(layer.work[rank] for layer in layers) for rank in ranks}

    def most(self, what: str) -> int:
        """The largest rank's sum over all layers of an attribute of :class:`Share`."""
        layers = self.all_layers()
        ranks = layers[0].shares if layers else ()
        return max((sum(getattr(layer.shares[rank], what) for layer in layers) for rank in ranks), default=0)

    @property
    def is_refused(self) -> bool:
        return any(layer.refused for layer in self.all_layers())


def _tree(found: Explanation) -> _Module:
    root = _Module("model", found.modules.get("", ""))
    for layer in found.layers:
        at, path = root, ""
        for name in layer.path.split(".") if layer.path else ():
            path = f"{path}.{name}".lstrip(".")
            at = at.children.setdefault(name, _Module(name, found.modules.get(path, "")))
        at.layers.append(layer)
    return root

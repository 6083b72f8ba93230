"""A preview as one HTML page that needs nothing else: modules that fold, operators that can be sorted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from .report import bytes_text, shape_text
from .results import PHASES, Explanation, Layer, Share, imbalance

__all__ = ["as_page"]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2733; background: #fff; margin: 2rem auto; max-width: 92rem;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p.inputs { margin: .2rem 0; color: #4a5868; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #c8d2dc; font-weight: 600; } td { border-bottom: 1px solid #e8edf2; }
th.l, td.l { text-align: left; }
#operators th { cursor: pointer; } #operators th:hover { color: #0b63b0; }
details { margin-left: 1.1rem; border-left: 2px solid #e8edf2; padding-left: .6rem; }
details.top { margin-left: 0; }
summary { cursor: pointer; padding: .15rem 0; }
summary .class { color: #4a5868; } summary .cost { color: #4a5868; font-size: .9em; margin-left: .8rem; }
.bars { display: inline-flex; align-items: flex-end; height: 1.3rem; gap: 1px; vertical-align: middle; }
.bars i { width: 7px; background: #4c8dc9; min-height: 1px; } .bars i.most { background: #d9822b; }
.long { display: inline-block; height: .8rem; background: #4c8dc9; vertical-align: middle; }
.refused { background: #fdf0ed; border-left: 4px solid #c8452c; padding: .5rem .8rem; margin: .5rem 0; }
.note { background: #fdf8e7; border-left: 4px solid #d9b12b; padding: .5rem .8rem; margin: .5rem 0; }
tr.refused td:first-child::after { content: " refused"; color: #c8452c; font-weight: 600; }
"""

# Sorts the table of operators by the column whose head is clicked, and the other way at the next click.
_SCRIPT = """
document.querySelectorAll('#operators th').forEach((head, column) => head.addEventListener('click', () => {
  const body = document.querySelector('#operators tbody'), down = head.dataset.down !== 'yes';
  const value = cell => cell.dataset.n ? Number(cell.dataset.n) : cell.textContent;
  const key = row => value(row.cells[column]);
  const rows = [...body.rows].sort((a, b) => key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0);
  if (down && rows.length && rows[0].cells[column].dataset.n) rows.reverse();
  head.dataset.down = down ? 'yes' : 'no';
  body.append(...rows);
}));
"""


def as_page(found: Explanation) -> str:
    """See :meth:`Explanation.to_html`."""
    world = " x ".join(map(str, found.mesh))
    passes = "forward and backward pass" if found.differentiated else "forward pass"
    inputs = "".join(f'<p class="inputs">Input {escape(text)}</p>' for text in found.inputs)
    refused = "".join(
        f'<div class="refused"><b>{escape(f"{layer.path} {layer.operator}".strip())}</b> is refused. '
        f"{escape(layer.refused)}</div>"
        for layer in found.refused
    )
    if found.stopped:
        refused += f'<div class="refused"><b>The run ended early.</b> {escape(found.stopped)}</div>'
    notes = "".join(f'<div class="note">{escape(note)}</div>' for note in found.notes)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>A model on shards</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>\n<h1>A model on shards: mesh {world}, {passes}</h1>\n{inputs}"
        f'<p class="inputs">Weights {bytes_text(found.weight_bytes) or "0 B"} on each rank</p>\n{refused}{notes}'
        f"<h2>Ranks</h2>\n{_ranks(found)}\n<h2>Modules</h2>\n"
        '<p class="inputs">Bars: each rank\'s work, the largest in orange. Numbers: the rank that has most.</p>\n'
        f'{_modules(found)}\n<h2>Operators</h2>\n<p class="inputs">Click a column\'s head to sort.</p>\n'
        f"{_table(' id=operators', found.layers)}\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _ranks(found: Explanation) -> str:
    flops = {rank: found.flops(rank) for rank in found.ranks}
    most = max(flops.values()) or 1
    rows = []
    for rank in found.ranks:
        forward, backward = (found.communication(rank, phase) for phase in PHASES)
        cells = [
            str(rank),
            bytes_text(found.input_bytes[rank]),
            bytes_text(found.total(rank, "saved_bytes")),
            str(forward.messages + backward.messages),
            _collectives(forward.collectives + backward.collectives),
            bytes_text(found.total(rank, "bytes_sent")),
            f"{flops[rank] / 1e9:.3g}",
        ]
        long = f'<span class="long" style="width:{120 * flops[rank] / most:.0f}px"></span>'
        rows.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + f'<td class="l">{long}</td></tr>')
    names = ("rank", "input", "kept", "messages", "collectives", "sent", "GFLOP")
    head = "".join(f"<th>{name}</th>" for name in names) + '<th class="l">work</th>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _collectives(counts: Mapping[str, int]) -> str:
    """As :attr:`Share.collectives`, by kind."""
    kinds = sorted(kind for kind in counts if kind != "all_to_all")
    return ", ".join(f"{counts[kind]} {kind.replace('_', '-')}" for kind in kinds)


# -- modules ----------------------------------------------------------------------------------------------------------


@dataclass
class _Module:
    """A module with its operators and the modules in it."""

    name: str
    kind: str = ""
    layers: list[Layer] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    def all_layers(self) -> list[Layer]:
        return self.layers + [layer for child in self.children.values() for layer in child.all_layers()]


def _tree(found: Explanation) -> _Module:
    root = _Module("model", found.modules.get("", ""))
    for layer in found.layers:
        at, path = root, ""
        for name in layer.path.split(".") if layer.path else ():
            path = f"{path}.{name}".lstrip(".")
            at = at.children.setdefault(name, _Module(name, found.modules.get(path, "")))
        at.layers.append(layer)
    return root


def _modules(found: Explanation) -> str:
    return _details(_tree(found), top=True)


def _details(module: _Module, top: bool = False) -> str:
    layers = module.all_layers()
    work = _sums(layers, None)
    sent, kept = (bytes_text(max(_sums(layers, of).values())) or "nothing" for of in (_sent, _kept))
    mark = " <b>refused</b>" if any(layer.refused for layer in layers) else ""
    kind = f' <span class="class">{escape(module.kind)}</span>' if module.kind else ""
    inner = "".join(_details(child) for child in module.children.values())
    if module.layers:
        inner = _table("", module.layers) + inner
    cost = f'<span class="cost">{sent} sent, {kept} kept, max/mean {imbalance(work):.2f}</span>'
    shown = f"<summary>{escape(module.name)}{kind} {_bars(work)}{cost}{mark}</summary>{inner}"
    return f"<details{' class=top open' if top else ''}>{shown}</details>"


def _sent(share: Share) -> int:
    return share.bytes_sent


def _kept(share: Share) -> int:
    return share.saved_bytes


def _sums(layers: Sequence[Layer], of: Callable[[Share], int] | None) -> dict[int, int]:
    """By rank, the sum of a cost over layers; None: of the work."""
    ranks = layers[0].shares if layers else {0: None}
    if of is None:
        flops = {rank: sum(sum(layer.shares[rank].flops) for layer in layers) for rank in ranks}
        return flops if any(flops.values()) else {rank: sum(layer.work[rank] for layer in layers) for rank in ranks}
    return {rank: sum(of(layer.shares[rank]) for layer in layers) for rank in ranks}


def _bars(work: Mapping[int, int]) -> str:
    most = max(work.values(), default=0)
    if not most:
        return ""
    parts = (
        f'<i{" class=most" if n == most else ""} style="height:{100 * n / most:.0f}%" title="rank {rank}: {n:,}"></i>'
        for rank, n in work.items()
    )
    return f'<span class="bars">{"".join(parts)}</span>'


# -- operators --------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "layer",
    "operator",
    "result",
    "layout",
    "messages",
    "collectives",
    "sent",
    "kept",
    "GFLOP",
    "max/mean",
    "ranks",
)
_LEFT = {"layer", "operator", "result", "layout", "ranks"}


def _side(column: str) -> str:
    return " class=l" if column in _LEFT else ""


def _row(layer: Layer) -> str:
    shares = layer.shares.values()
    flops = max(sum(share.flops) for share in shares)
    messages, collectives = max(s.messages for s in shares), max(s.collectives for s in shares)
    sent, kept = (max(map(of, shares)) for of in (_sent, _kept))
    sizes = "; ".join(f"rank {rank}: {shape_text(share.outputs)}" for rank, share in layer.shares.items())
    cells: list[tuple[str, float | None]] = [
        (escape(layer.path), None),
        (escape(layer.operator), None),
        (shape_text(layer.shapes), None),
        (f'<span title="{escape(sizes)}">{escape(layer.layout or ("plain" if layer.shapes else ""))}</span>', None),
        (str(messages or ""), messages),
        (str(collectives or ""), collectives),
        (bytes_text(sent), sent),
        (bytes_text(kept), kept),
        (f"{flops / 1e9:.3g}" if flops else "", flops),
        (f"{layer.imbalance:.2f}", layer.imbalance),
        (_bars(layer.work), None),
    ]
    body = "".join(
        f"<td{_side(name)}{'' if n is None else f' data-n={n}'}>{text}</td>" for name, (text, n) in zip(_COLUMNS, cells)
    )
    return f"<tr{' class=refused' if layer.refused else ''}>{body}</tr>"


def _table(options: str, layers: Sequence[Layer]) -> str:
    head = "".join(f"<th{_side(name)}>{name}</th>" for name in _COLUMNS)
    rows = "".join(map(_row, layers))
    return f'<div class="wide"><table{options}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'

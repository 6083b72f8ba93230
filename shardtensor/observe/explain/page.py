"""A preview as one HTML page that needs nothing else: modules that fold, operators that can be sorted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .report import bytes_text, shape_text
from .results import PHASES, Explanation, Layer, imbalance


def as_page(found: Explanation) -> str:
    """See :meth:`Explanation.to_html`. The page is page.html, a template of jinja2."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_html() writes its page with jinja2: pip install shardtensor[html]") from error
    templates = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    templates.filters |= {"bytes": bytes_text, "shapes": shape_text, "giga": lambda n: f"{n / 1e9:.3g}"}
    page = templates.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    most = max(map(found.flops, found.ranks)) or 1
    return page.render(found=found, model=_tree(found), most=most, collectives=_collectives, imbalance=imbalance)


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

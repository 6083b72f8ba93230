"""The layers of anemoi-models that keep a forecast's variables within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from networks.oracle import Network, all_exact

PACKAGE = "anemoi.models.layers.bounding"
pytest.importorskip(PACKAGE)


def bounding(name: str, **options: Any) -> Network:
    given = {"variables": ["a"], "name_to_index": {"a": 1, "b": 2}, **options}
    # The layers write to their input, which here is a leaf.
    return Network(lambda p: getattr(p, name)(**given), (2, 13, 6), 1, call=lambda layer, x: layer(x * 1))


NETWORKS = {
    "ReluBounding": bounding("ReluBounding"),
    "HardtanhBounding": bounding("HardtanhBounding", min_val=0.0, max_val=1.0),
    "FractionBounding": bounding("FractionBounding", min_val=0.0, max_val=1.0, total_var="b"),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("ReluBounding",))

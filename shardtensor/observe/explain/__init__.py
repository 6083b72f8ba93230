"""Look before you train: what a model would do on the ranks of a mesh, worked out in one process without a cluster.

``explain`` runs the model once as each rank, on tensors without values, with the code of a real run. So its counts are
those of a real run.
"""

from __future__ import annotations

from ..machines import MACHINES, Machine
from .advice import Advice, Choice, advise
from .excess import Excess
from .layers import Layer, Share
from .report import Explanation
from .run import UnfitArguments, explain

__all__ = [
    "MACHINES",
    "Advice",
    "Choice",
    "Excess",
    "Explanation",
    "Layer",
    "Machine",
    "Share",
    "UnfitArguments",
    "advise",
    "explain",
]

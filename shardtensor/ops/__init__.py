"""One module per family of operators; importing them fills the registry and the rules."""

from . import (  # noqa: F401
    attention,
    convolution,
    extremes,
    indexing,
    joining,
    linear,
    losses,
    multihead,
    neighborhood,
    normalization,
    padding,
    pointwise,
    pooling,
    random,
    reductions,
    resampling,
    scans,
    slicing,
    transposed,
    views,
)

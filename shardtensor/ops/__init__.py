"""The operators, in one package per family; importing them fills the registry and the rules."""

from . import (  # noqa: F401
    attention,
    conditions,
    convolution,
    elementwise,
    fft,
    formulas,
    indexing,
    interop,
    linalg,
    loss,
    neighborhood,
    normalization,
    pooling,
    recurrent,
    reduction,
    shape,
    sorting,
    spatial,
)

"""One module per family of operators; importing them fills the registry and the rules."""

from . import convolution, padding, pointwise, pooling, reductions, resampling, views  # noqa: F401

"""One module per family of operators; importing them fills the registry and the rules."""

from . import convolution, pointwise, reductions, views  # noqa: F401

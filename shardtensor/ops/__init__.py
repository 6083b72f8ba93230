"""The operators, in one package per family; importing them fills the registry and the rules.

- ``common``: what several families share: alignment of operands, halos, rings, contractions, a distributed sort.
- ``elementwise``: operators on each element by itself: pointwise ones, activations, random numbers, fused optimizers.
- ``reduction``: sums, means, norms and other reductions, and what is accumulated along a dim.
- ``sorting``: sorting, order statistics, quantiles, distinct values and histograms.
- ``convolution``: convolutions and transposed convolutions, with halos of the neighbouring shards.
- ``pooling``: pooling over windows, fixed and adaptive.
- ``spatial``: operators on images and volumes: padding, interpolation, ``unfold`` and ``fold``.
- ``normalization``: batch, instance, layer, group and RMS normalization.
- ``attention``: attention over all tokens: ``scaled_dot_product_attention``, ``nn.MultiheadAttention``, flex attention.
- ``neighborhood``: neighborhood attention, natten's: every token attends to a window around it.
- ``loss``: losses: element by element, and over classes.
- ``linalg``: linear algebra: matrix products, decompositions, distances.
- ``fft``: Fourier transforms and spectrograms.
- ``recurrent``: recurrent networks: ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and their cells.
- ``indexing``: reading and writing entries by index or mask: subscripts, ``gather``, ``index_select``, embeddings.
- ``shape``: views, slices, joins, diagonals: what changes a tensor's shape and no element of it.
- ``interop``: where a ShardTensor meets what is not one: collectives of ``torch.distributed``, NumPy, DLPack.
"""

from . import (  # noqa: F401
    attention,
    convolution,
    elementwise,
    fft,
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

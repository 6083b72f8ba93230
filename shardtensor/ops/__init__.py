"""The operators, in one package per family; importing them fills the registry and the rules.

- ``common``: what several families share: alignment of operands, halos, rings, contractions, a distributed sort.
- ``elementwise``: operators on each element: arithmetic, activations, softmax, dropout, random numbers, optimizers.
- ``reduction``: sums, means, variances, extremes and other reductions, and what is accumulated along a dim.
- ``sorting``: sorting, order statistics, quantiles, searching, distinct values and histograms.
- ``convolution``: convolutions and transposed convolutions, with halos of the neighbouring shards.
- ``pooling``: pooling over windows: fixed, adaptive and fractional; unpooling.
- ``spatial``: operators on images and volumes: padding, interpolation, grids, ``unfold``, ``pixel_shuffle``.
- ``normalization``: batch, instance, layer, group and RMS normalization.
- ``attention``: attention over all tokens: ``scaled_dot_product_attention``, ``nn.MultiheadAttention``, flex attention.
- ``neighborhood``: neighborhood attention, natten's: every token attends to a window around it.
- ``loss``: losses: element by element, over classes, and ``ctc_loss``.
- ``linalg``: linear algebra: matrix products, decompositions, norms, distances.
- ``fft``: Fourier transforms and spectrograms.
- ``recurrent``: recurrent networks: ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and their cells.
- ``indexing``: reading and writing entries by index or mask: subscripts, ``gather``, ``index_select``, embeddings.
- ``shape``: views, slices, joins, repetitions, flips, diagonals: what moves elements and changes none.
- ``formulas``: operators of torch's formulas, by the functions that they are parts of.
- ``interop``: where a ShardTensor meets what is not one: collectives of ``torch.distributed``, NumPy, DLPack.
"""

from . import (  # noqa: F401
    attention,
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

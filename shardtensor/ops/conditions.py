"""What operators refuse, for :func:`shardtensor.supports`; ``docs/operators.md`` has the same texts."""

from __future__ import annotations

from ..dispatch.registry import CONDITIONS

_NORMS = "resharding if no other dim is long enough; a parameter that would have to be gathered"
_MATRICES = (
    "a single sharded matrix, or fewer matrices than ranks, that take more bytes than a rank's largest shard and than "
    "256 KiB on CPUs or 4 MiB on other devices"
)
_MATRIX_NORMS = "nuclear and spectral norms of large sharded matrices"
_BLOCKS = "blocks of both operands on two mesh dims that would have to be sent at once"
_COORDINATES = "cross, cdist and pdist if the dim of the coordinates is sharded and no other dim can be"
_PLANES = "sharded spatial dims, if batch and channels are both shorter than the number of ranks"
_ATTENTION = "sharded features, masks that would have to be gathered, second derivatives"
_SHAPES = (
    "a reshape that leaves no dim to shard (two sharded dims flattened into one); shard sizes that cannot become "
    "multiples of the part by which a dim is split"
)
_LABELS = "margin losses over sharded classes, and ctc_loss, if the batch is shorter than the number of ranks"

# By module: {names of functions, without underscores around them and linalg_ before them: text}; "" is all others.
_CONDITIONS = {
    "attention.multihead": {"": _ATTENTION},
    "attention.sdpa": {"": _ATTENTION},
    "convolution.conv": {"": "sharded weights"},
    "elementwise.random": {
        "multinomial": "multinomial if the last dim of the probabilities is sharded and the batch is shorter than the "
        "number of ranks"
    },
    "fft": {"": "transforms along a sharded dim if no free dim is as long as the number of ranks"},
    "indexing.embedding": {"embedding embedding_bag": "max_norm and sparse gradients of embeddings"},
    "indexing.getitem": {"index_put": "values of index_put that would have to be gathered"},
    "indexing.index_operators": {"gather": "an index of gather with another number of dims than the tensor"},
    "indexing.masked_select": {
        "": "masks that cannot be sharded along their first dim (shorter than the number of ranks, sharded twice)"
    },
    "linalg.cross": {"": _COORDINATES},
    "linalg.decomposition": {"": _MATRICES},
    "linalg.einsum": {"": _BLOCKS},
    "linalg.matmul": {"": _BLOCKS},
    "linalg.norm": {"cdist pdist": _COORDINATES, "matrix_norm norm": _MATRIX_NORMS},
    "loss.cross_entropy": {
        "linear_cross_entropy": "operands of linear_cross_entropy that would have to be gathered",
        "multi_margin_loss multilabel_margin_loss ctc_loss": _LABELS,
    },
    "normalization.batch_instance": {"": _NORMS},
    "normalization.layer_group_rms": {"": _NORMS},
    "pooling.pool": {
        "fractional_max_pool2d fractional_max_pool3d max_unpool1d max_unpool2d max_unpool3d": _PLANES,
    },
    "recurrent": {
        "": "sharded features of given states next to a short batch, second derivatives along the sequence, packed "
        "sequences"
    },
    "shape.view": {"view reshape unsafe_view reshape_alias": _SHAPES},
    "sorting.histogram": {"histogram": "bins or weights of histogram that would have to be gathered"},
    "sorting.sort": {"mode": "mode if no free dim is as long as the number of ranks"},
    "sorting.unique": {"": "unique of all elements sharded on several mesh dims"},
    "spatial.interpolate": {"": "smooth resampling of integers"},
    "spatial.pad": {"": "circular padding that crops one side and wraps around the rest more than once"},
    "spatial.unfold": {
        "as_strided": "as_strided, except for overlapping frames (windows), the tensor's own sizes and strides, and "
        "its first element"
    },
}

for _module, _texts in _CONDITIONS.items():
    _where = f"{__package__}.{_module}"
    CONDITIONS.update({(_where, _name): _text for _names, _text in _texts.items() for _name in _names.split(" ")})

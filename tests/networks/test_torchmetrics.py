"""Measures of torchmetrics: of images, of predicted numbers, of classes, on shards of what is measured."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded, run_distributed

PACKAGE = "torchmetrics"
pytest.importorskip(PACKAGE)

IMAGES = {
    "structural_similarity_index_measure": {"data_range": 1.0},
    "peak_signal_noise_ratio": {"data_range": 1.0},
    "universal_image_quality_index": {},
    "spectral_angle_mapper": {},
    "error_relative_global_dimensionless_synthesis": {},
    "root_mean_squared_error_using_sliding_window": {},
}
NUMBERS = [
    *("mean_squared_error", "mean_absolute_percentage_error", "log_cosh_error", "r2_score", "explained_variance"),
    *("pearson_corrcoef", "concordance_corrcoef", "spearman_corrcoef", "kendall_rank_corrcoef"),
]
CLASSES = [
    *("accuracy", "f1_score", "confusion_matrix", "auroc", "average_precision", "calibration_error"),
    *("cohen_kappa", "matthews_corrcoef", "jaccard_index", "hinge_loss"),
]


def waves(x):
    return torch.arange(x.shape.numel(), dtype=x.dtype).reshape(x.shape).sin().abs() + 0.1


def check():
    import torchmetrics.functional as measures
    import torchmetrics.functional.image as of_images

    task = {"task": "multiclass", "num_classes": 5}

    def of_image(x, name):
        return getattr(of_images, name)(x.sigmoid(), waves(x), **IMAGES[name])

    def of_numbers(x, name):
        return getattr(measures, name)(x, waves(x))

    def of_classes(x, name):
        return getattr(measures, name)(x.softmax(-1), torch.arange(31) % 5, **task)

    kinds = ((of_image, IMAGES, (2, 3, 48, 48), 2), (of_numbers, NUMBERS, (31,), 0), (of_classes, CLASSES, (31, 5), 0))
    cases = [(name, function, shape, dim) for function, names, shape, dim in kinds for name in names]
    for name, function, shape, dim in cases:
        x = torch.randn(shape, dtype=torch.float64)
        first = shape[dim] * 5 // 8
        sizes = {0: (first, shape[dim] - first)}
        try:
            places = [[Shard(dim)], None]
            assert_matches_unsharded(
                function, x, name, mesh_shape=2, placements=places, shard_sizes=[sizes, None], rtol=1e-8
            )
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def test_measures():
    run_distributed(check, 2, timeout=200)

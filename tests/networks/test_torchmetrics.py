"""Measures of torchmetrics: of images, of predicted numbers, of classes, of sound, on shards of what is measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from seeded import seeded
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from networks.oracle import Network, all_exact, all_refused, integers
from networks.programs import load
from shardtensor.testing import assert_matches_unsharded

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


@on_ranks(2, timeout=200)
def test_measures():
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


# -- on one placement, some with options, some of integers -------------------------------------------------------------

SOUND, VECTOR, SCORES = (2, 2, 400), (31,), (31, 5)


def of(function: Callable[[Tensor], Any], shape: tuple[int, ...], dim: int = 0, **options: Any) -> Network:
    options = {"tolerance": 1e-10, "reduced": 300.0, **options}
    return Network(lambda _: nn.Identity(), shape, dim, call=lambda _, x: function(x), **options)


def measure(name: str, module: str = "") -> Any:
    return getattr(load(f"torchmetrics{module}"), name)


def other(x: Tensor) -> Tensor:
    """An input like this one, the same on every rank."""
    return torch.randn(x.shape, generator=seeded(1), dtype=x.dtype)


def of_pair(
    name: str,
    shape: tuple[int, ...] = VECTOR,
    dim: int = 0,
    module: str = ".functional",
    act: Callable[[Tensor], Tensor] = torch.sigmoid,
    tolerance: float = 1e-10,
    backward: bool = True,
    **options: Any,
) -> Network:
    """The measure ``name`` of an input and another one, which both pass ``act``."""
    call = lambda x: measure(name, module)(act(x), act(other(x)), **options)  # noqa: E731
    return of(call, shape, dim, tolerance=tolerance, backward=backward)


def as_it_is(x: Tensor) -> Tensor:
    return x


def probabilities(x: Tensor) -> Tensor:
    return x.softmax(1)


of_images = partial(of_pair, shape=(2, 3, 48, 32), dim=2, module=".functional.image")
of_sounds = partial(of_pair, shape=SOUND, dim=2, module=".functional.audio", act=as_it_is)


def of_classes(name: str, **options: Any) -> Network:
    return of(
        lambda x: measure(name, ".functional")(
            x.softmax(1), torch.arange(31) % 5, task="multiclass", num_classes=5, **options
        ),
        SCORES,
        backward=False,
    )


def of_two_classes(name: str, **options: Any) -> Network:
    return of(
        lambda x: measure(name, ".functional")(x.sigmoid(), torch.arange(31) % 2, task="binary", **options),
        VECTOR,
        backward=False,
    )


def of_masks(name: str) -> Network:
    return of(
        lambda x: measure(name, ".functional.segmentation")((x > 0).long(), (other(x) > 0).long(), num_classes=3),
        (2, 3, 48, 32),
        2,
        backward=False,
    )


def same_classes(x: Tensor) -> Any:
    labels = torch.arange(31)[:, None] % 5
    return measure("exact_match", ".functional")(x.argmax(1, keepdim=True), labels, task="multiclass", num_classes=5)


def of_permuted(x: Tensor) -> Any:
    audio = load("torchmetrics.functional.audio")
    return audio.permutation_invariant_training(x, other(x), audio.scale_invariant_signal_noise_ratio)


def pansharpened(x: Tensor) -> Any:
    fused, low = x.sigmoid(), other(x).sigmoid()[:, :, ::4, ::4]
    return measure("spatial_distortion_index", ".functional.image")(fused, low, fused * 0.5)


def similarity(x: Tensor) -> Any:
    return measure("StructuralSimilarityIndexMeasure", ".image")(data_range=1.0)(x.sigmoid(), other(x).sigmoid())


def words(x: Tensor) -> Any:
    ids = torch.randint(0, 5, x.shape[:2], generator=seeded(1))
    return measure("perplexity", ".functional.text")(x, ids)


def module(name: str) -> Network:
    """A measure that keeps a state."""
    return of(lambda x: measure(name)().set_dtype(torch.float64)(x, other(x)), VECTOR)


NETWORKS = {
    "total_variation": of(lambda x: measure("total_variation", ".functional.image")(x), (2, 3, 48, 32), 2),
    "image_gradients": of(lambda x: measure("image_gradients", ".functional.image")(x), (2, 3, 48, 32), 2),
    "relative_average_spectral_error": of_images("relative_average_spectral_error"),
    "spectral_distortion_index": of_images("spectral_distortion_index"),
    "multiscale_structural_similarity_index_measure": of_images(
        "multiscale_structural_similarity_index_measure", data_range=1.0, kernel_size=3, betas=(0.5, 0.5)
    ),
    "spatial_correlation_coefficient": of_images(  # whose filter is in float32
        "spatial_correlation_coefficient", act=as_it_is, tolerance=1e-6
    ),
    "visual_information_fidelity": of_images("visual_information_fidelity", shape=(1, 1, 64, 64), backward=False),
    "peak_signal_noise_ratio_with_blocked_effect": of_images(
        "peak_signal_noise_ratio_with_blocked_effect", shape=(2, 1, 48, 32), backward=False, data_range=1.0
    ),
    "spatial_distortion_index": of(pansharpened, (1, 2, 64, 64), 2, tolerance=1e-5),
    "StructuralSimilarityIndexMeasure": of(similarity, (2, 3, 48, 32), 2),
    **{
        name: of_sounds(name)
        for name in (
            "signal_noise_ratio",
            "scale_invariant_signal_noise_ratio",
            "scale_invariant_signal_distortion_ratio",
            "source_aggregated_signal_distortion_ratio",
        )
    },
    "signal_distortion_ratio": of_sounds(
        "signal_distortion_ratio", shape=(2, 400), dim=1, tolerance=1e-6, filter_length=16
    ),
    "permutation_invariant_training": of(of_permuted, SOUND, 2),
    **{
        name: of(lambda x, name=name: measure(name, ".functional")(x), (21, 6))
        for name in (
            "pairwise_cosine_similarity",
            "pairwise_euclidean_distance",
            "pairwise_linear_similarity",
            "pairwise_manhattan_distance",
        )
    },
    "minkowski_distance": of_pair("minkowski_distance", p=3),
    "tweedie_deviance_score": of_pair("tweedie_deviance_score", power=1.5),
    "critical_success_index": of_pair("critical_success_index", threshold=0.5),
    "kl_divergence": of_pair("kl_divergence", SCORES, act=probabilities),
    "cosine_similarity": of_pair("cosine_similarity", SCORES),
    **{
        name: of_pair(name)
        for name in (
            "relative_squared_error",
            "weighted_mean_absolute_percentage_error",
            "normalized_root_mean_squared_error",
        )
    },
    **{
        f"{name}, classes": of_classes(name)
        for name in (
            *("precision", "recall", "specificity", "hamming_distance", "stat_scores", "roc"),
            "precision_recall_curve",
        )
    },
    "fbeta_score, classes": of_classes("fbeta_score", beta=2.0),
    "exact_match, classes": of(same_classes, SCORES, backward=False),
    **{
        f"{name}, two classes": of_two_classes(name)
        for name in (
            *("precision", "recall", "specificity", "hamming_distance", "stat_scores", "roc"),
            "precision_recall_curve",
        )
    },
    "fbeta_score, two classes": of_two_classes("fbeta_score", beta=2.0),
    "roc, thresholds": of_two_classes("roc", thresholds=7),
    "auroc, labels": of(
        lambda x: measure("auroc", ".functional")(
            x.sigmoid(), (other(x) > 0).long(), task="multilabel", num_labels=5
        ),
        SCORES,
        backward=False,
    ),
    "dice_score": of_masks("dice_score"),
    "mean_iou": of_masks("mean_iou"),
    "retrieval_normalized_dcg": of(
        lambda x: measure("retrieval_normalized_dcg", ".functional.retrieval")(x, torch.arange(31) % 3),
        VECTOR,
        backward=False,
    ),
    "retrieval_average_precision": of(
        lambda x: measure("retrieval_average_precision", ".functional.retrieval")(x, torch.arange(31) % 3 == 0),
        VECTOR,
        backward=False,
    ),
    "procrustes_disparity": of(
        lambda x: measure("procrustes_disparity", ".functional.shape")(x, other(x)), (2, 13, 3), 1, backward=False
    ),
    "perplexity": of(words, (2, 21, 5), 1),
    "MeanMetric": of(lambda x: measure("MeanMetric")().set_dtype(torch.float64)(x), (2, 3, 48, 32), 2),
    "MeanSquaredError": module("MeanSquaredError"),
    "R2Score": module("R2Score"),
    "rand_score": of(
        lambda x: measure("rand_score", ".functional.clustering")(
            x, torch.randint(0, 4, (31,), generator=seeded(1))
        ),
        VECTOR,
        draw=integers(4),
    ),
    "calinski_harabasz_score": of(
        lambda x: measure("calinski_harabasz_score", ".functional.clustering")(x, torch.arange(31) % 4), SCORES
    ),
}
REFUSED = {
    "rand_score": "a sparse tensor's constructor: a sparse matrix is the same on every rank",
    "retrieval_normalized_dcg": "index_put_.default: the value and the tensor .* have different layouts",
}


test_measures_are_exact = all_exact(__name__, [name for name in NETWORKS if name not in REFUSED], ["total_variation"])
test_what_is_refused_is_refused_on_every_rank = all_refused(__name__, REFUSED)

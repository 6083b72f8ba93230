"""What the examples share, and what each of them does without the packages of its data and its networks."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def module(monkeypatch):
    """Imports a module of an example; ``common`` holds what they share."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "common"))

    def load(folder, name):
        monkeypatch.syspath_prepend(str(EXAMPLES / folder))
        return importlib.import_module(name)

    return load


def test_layouts_are_even_unless_asked(module):
    make_layout = module("common", "layout").make_layout
    globe = {"rows": 675, "columns": 1350}
    assert make_layout(globe, 2, None).sizes == {"rows": (338, 337), "columns": (1350,)}
    assert make_layout(globe, 2, None, uneven=True).shard_sizes == {0: (150, 525)}
    assert make_layout(globe, 4, "2x2", ["100+575"], uneven=True).shard_sizes == {0: (100, 575), 1: (300, 1050)}
    assert make_layout({"rows": 5}, 1, None).boxes() == [((0, 5),)]


def test_boxes_are_in_the_order_of_ranks_and_fill_the_volume(module):
    dims = {"x": 7, "y": 5, "z": 3}
    layout = module("common", "layout").make_layout(dims, 6, "3x2", ["4+0+3", "1+4"])
    boxes = layout.boxes()
    assert boxes[1] == ((0, 4), (1, 5), (0, 3)) and boxes[2] == ((4, 4), (0, 1), (0, 3))
    assert len(boxes) == 6
    assert sum(math.prod(stop - start for start, stop in box) for box in boxes) == 7 * 5 * 3


@pytest.mark.parametrize(
    ("ranks", "mesh", "sizes", "text"),
    [
        (2, None, ["4+4"], "add up to 8, but there are 7 x"),
        (2, None, ["4+2+1"], "3 of them, but the mesh has 2 ranks along the x"),
        (4, "2x3", [], "has 6 positions, but there are 4 ranks"),
        (8, "2x2x2", [], "expected up to 2 numbers of ranks, for x x y"),
        (2, "2", [None, "5"], "does not shard"),
        (2, "two", [], "expected numbers with 'x' between them"),
        (2, None, ["4,3"], "expected numbers with '+' between them"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(module, ranks, mesh, sizes, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        module("common", "layout").make_layout({"x": 7, "y": 5}, ranks, mesh, sizes)


def test_borders_are_between_the_shards(module):
    pytest.importorskip("matplotlib")
    drawing = module("common", "drawing")
    figure, axes = drawing.subplots(1, 1, (4, 3), "title")
    drawing.draw_borders(axes[0, 0], (3, 0, 4), (2, 6), names=True)
    lines = [(*sorted(set(line.get_xdata())), *sorted(set(line.get_ydata()))) for line in axes[0, 0].lines]
    assert lines == [(0, 1, 3), (0, 1, 3), (2, 0, 1)]
    named = [(text.get_text(), text.xy) for text in axes[0, 0].texts]
    assert named == [
        ("rank 0: 3 x 2", (0, 0)),
        ("rank 1: 3 x 6", (2, 0)),
        ("rank 4: 4 x 2", (0, 3)),
        ("rank 5: 4 x 6", (2, 3)),
    ]


def test_the_last_step_is_counted_and_the_first_not_timed(module):
    pytest.importorskip("tqdm")
    running = module("common", "running")
    losses = iter((3.0, 2.0, 1.0))
    history = running.repeat(lambda: next(losses), 3, "steps", quiet=True, count=True)
    assert history.losses == [3.0, 2.0, 1.0] and len(history.seconds) == 3
    assert (history.messages, history.sent) == (0, 0)
    history.seconds = [9.0, 1.0, 2.0]
    assert history.step_time == 1.5


def test_memory_is_of_tensors_that_there_are_at_one_time(module):
    pytest.importorskip("tqdm")
    running = module("common", "running")

    def run():
        first = torch.ones(3 * 2**18)
        second = first + first
        del first
        return second * 2

    kept = torch.ones(2**20)  # from before
    mib = running.most_at_once(run, torch.device("cpu")) * 1024
    assert mib == pytest.approx(6, abs=0.01) and kept.any()


def test_losses_agree_or_not(module, capsys):
    pytest.importorskip("tqdm")
    running = module("common", "running")
    assert running.same_losses([1.0, 2.0], [1.0, 2.0 + 1e-10], "float64")
    assert not running.same_losses([1.0, 2.0], [1.0, 2.0 + 1e-8], "float64")
    assert not running.same_losses([1.0, float("nan")], [1.0, 2.0], "float32")
    assert capsys.readouterr().out.count("FAIL: largest relative difference of the losses") == 2


def test_a_brain_fits_into_multiples(module):
    np, volume = pytest.importorskip("numpy"), module("brain", "volume")
    inside = np.zeros((20, 30, 9), bool)
    inside[3:14, 5:21, 1:9] = True
    values = np.where(inside, np.random.default_rng(0).normal(size=inside.shape), 0.0)
    fitted = volume.fit(values, inside, 8)
    assert fitted.shape == (16, 16, 8)
    assert np.array_equal(fitted[2:13], values[3:14, 5:21, 1:9]) and not fitted[:2].any() and not fitted[13:].any()


def test_planes_are_upright_and_their_borders_where_the_shards_are(module):
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    slices, make_layout = module("brain", "slices"), module("common", "layout").make_layout
    layout = make_layout(dict(zip(module("brain", "volume").DIMS, (7, 6, 5))), 6, "2x3", ["3+4", "1+2+3"])
    # Every voxel holds its rank; a border in the picture lies where this number changes.
    ranks = np.empty((7, 6, 5), int)
    for rank, box in enumerate(layout.boxes()):
        ranks[tuple(slice(*interval) for interval in box)] = rank
    for plane in range(3):
        picture = slices.upright(ranks, plane, 4)
        rows, columns = slices.borders(layout, plane)
        for axis, sizes in ((0, rows), (1, columns)):
            changes = np.diff(picture, axis=axis).any(axis=1 - axis).nonzero()[0] + 1
            assert changes.tolist() == np.cumsum(sizes)[:-1].tolist()
    height = np.broadcast_to(np.arange(5), (7, 6, 5))
    assert slices.upright(height, 0, 0)[:, 0].tolist() == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--check"], "start it with torchrun"),
        (["--width", "12"], "--width a multiple of 8"),
        (["--resolution", "0"], "--resolution must be from 1 to 8"),
    ],
)
def test_options_of_the_brain_that_do_not_fit_are_refused(module, monkeypatch, capsys, options, text):
    pytest.importorskip("tqdm")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as left:
        module("brain", "segment").parse_arguments(options)
    assert left.value.code == 2 and text in capsys.readouterr().err
    assert module("brain", "segment").parse_arguments([]).dtype == "float32"


def test_dice_is_the_overlap(module):
    pytest.importorskip("tqdm")
    truth = torch.tensor([0, 1, 1, 1, 2, 2, 0])
    found = torch.tensor([1, 1, 1, 0, 0, 0, 2])
    scores = module("brain", "segment").dice(found, truth)
    assert list(scores.values()) == pytest.approx([2 / 3, 0.0])


def test_errors_of_pictures_are_logarithms(module):
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    canvas = module("vae", "canvas")
    found = canvas.magnitude(np.array([[-1e-2, 0.0]]))
    assert found[0, 0] == -2 and np.isnan(found[0, 1])
    video = torch.arange(5.0)[None, None, :, None, None].expand(1, 3, 5, 2, 4)
    assert canvas.pixels(video).shape == (2, 4, 3) and (canvas.pixels(video) == 2).all()
    assert canvas.stretched(np.array([[[1.0, 5.0], [3.0, 5.0]]])).tolist() == [[[0.0, 0.0], [1.0, 0.0]]]


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_mesh_of_the_sphere(module, level):
    sphere = module("mesh", "sphere")
    nodes, faces = sphere.icosphere(level)
    edges = sphere.neighbors_of(faces)
    assert len(nodes) == sphere.nodes_of(level) and faces.shape == (20 * 4**level, 3)
    torch.testing.assert_close(nodes.norm(dim=1), torch.ones(len(nodes), dtype=torch.float64), rtol=1e-14, atol=0)
    # Euler's formula, each edge once in both directions, twelve nodes with five neighbours and the others with six.
    assert len(nodes) - edges.shape[1] // 2 + len(faces) == 2
    assert edges.unique(dim=1).shape == edges.shape and torch.equal(edges.flip(0).unique(dim=1), edges.unique(dim=1))
    assert edges[1].bincount().bincount().tolist() == [0] * 5 + ([12] if level == 0 else [12, len(nodes) - 12])
    lengths = (nodes[edges[0]] - nodes[edges[1]]).norm(dim=1)
    assert lengths.max() < 1.3 * lengths.min()


def test_pixels_are_where_the_picture_has_them(module):
    pixels = module("mesh", "sphere").pixels_of(4).view(4, 8, 3)
    assert (pixels[0, :, 2] > 0.9).all() and (pixels[3, :, 2] < -0.9).all()  # row 0 touches the north pole
    assert (pixels[:, 0, 0] < 0).all() and (pixels[:, 0, 1] < 0).all()  # column 0 lies to the east of the date line
    assert (pixels[:, 4, 0] > 0).all() and (pixels[:, 4, 1] > 0).all()  # column 4 to the east of Greenwich


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_mesh_and_its_pixels_are_divided_alike(module, ranks):
    sphere = module("mesh", "sphere")
    graph = sphere.Graph.of(2, 12, ranks)
    assert sum(graph.nodes.sizes) == 162 and sum(graph.pixels.sizes) == 288
    assert max(graph.nodes.sizes) - min(graph.nodes.sizes) <= 1
    assert sum(graph.encode.sizes) == sum(graph.decode.sizes) == 3 * 288
    pixels, nodes = graph.pixels.nodes(sphere.pixels_of(12)), graph.positions
    for edges, sources, targets in ((graph.encode, pixels, nodes), (graph.decode, nodes, pixels)):
        source, target = edges.edge_index
        assert (sources[source] - targets[target]).norm(dim=1).max() < 0.6
    for rank in range(ranks):
        read = sphere.rows_read(graph.process, graph.nodes, rank)
        assert len(read) == sum(graph.nodes.reads[rank])
    # The triangles are of neighbours.
    assert (nodes[graph.faces] - nodes[graph.faces.roll(1, 1)]).norm(dim=2).max() < 0.4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--check"], "start it with torchrun"),
        (["--width", "3"], "--width even"),
        (["--level", "10"], "--level must be from 0 to 9"),
    ],
)
def test_options_of_the_mesh_that_do_not_fit_are_refused(module, monkeypatch, capsys, options, text):
    for name in ("tqdm", "torch_geometric", "PIL"):
        pytest.importorskip(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as left:
        module("mesh", "land").parse_arguments(options)
    assert left.value.code == 2 and text in capsys.readouterr().err
    assert module("mesh", "land").parse_arguments([]).steps == 60


@pytest.mark.slow
def test_the_example_with_fsdp_passes_its_check():
    """A program with FSDP2 and a domain, told of in the docs; random pixels in place of the globe's data."""
    example = EXAMPLES / "fsdp_domain.py"
    assert example.name in (EXAMPLES.parent / "docs" / "train.md").read_text()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(example)]
    options = ["--check", "--noise", "--resolution", "37", "--steps", "4", "--width", "4", "--dtype", "float64"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0 and "PASS: largest" in result.stdout, result.stdout + result.stderr

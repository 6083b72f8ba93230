"""Which rank holds what, as text and as a picture: right for any sizes, without communication."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardtensor
from shardtensor.testing import count_communication, shard, shared_mesh, simulate_ranks


def shown(shape, mesh, placements, sizes=None, **options):
    """As rank 0 of a mesh sees it; nothing is communicated."""

    def run():
        x = shard(torch.zeros(shape), shared_mesh(mesh), placements, sizes)
        with count_communication() as counted:
            text = shardtensor.visualize(x, **options)
        assert counted == type(counted)()
        return text, repr(x)

    world = mesh if isinstance(mesh, int) else torch.Size(mesh).numel()
    texts = simulate_ranks(run, world)
    assert len({text for text, _ in texts}) == 1
    return texts[0][0]


def test_uneven_and_empty_shards():
    text = shown((1, 3, 16, 4), 4, [Shard(2)], {0: (2, 0, 4, 10)}, halo=3)
    lines = text.splitlines()
    assert lines[0] == "ShardTensor(1, 3, 16, 4) float32 on mesh (4,) as (S(2)[2, 0, 4, 10])"
    assert lines[-4:] == [
        "rank 0: 1x3x2x4, dim 2 [0:2], reads dim 2 [0:5]",
        "rank 1: 1x3x0x4, dim 2 [2:2], empty",
        "rank 2: 1x3x4x4, dim 2 [2:6], reads dim 2 [0:9]",
        "rank 3: 1x3x10x4, dim 2 [6:16], reads dim 2 [3:16]",
    ]
    # To scale: 64 columns for 16 rows.
    assert lines[1:5] == [
        "dim 2 across; numbers are ranks",
        "+-------+---------------+" + "-" * 39 + "+",
        "|   0   |       2       |" + "3".center(39) + "|",
        "+-------+---------------+" + "-" * 39 + "+",
    ]


def test_a_mesh_of_two_dims():
    text = shown((8, 12), (2, 3), [Shard(0), Shard(1)], {0: (2, 6), 1: (3, 3, 6)}, halo={1: 1})
    assert "dim 1 across, dim 0 down" in text
    assert "rank 4: 6x3, dim 0 [2:8], dim 1 [3:6], reads dim 1 [2:7]" in text
    map_lines = text.splitlines()[2:-6]
    assert {len(line) for line in map_lines} == {65} and len(map_lines) == 25
    corners = [i for i, line in enumerate(map_lines) if line.startswith("+")]
    assert corners == [0, 6, 24] and [i for i, c in enumerate(map_lines[0]) if c == "+"] == [0, 16, 32, 64]


def test_ranks_that_hold_the_same():
    text = shown((6, 4), (2, 2), [Replicate(), Shard(0)], {1: (5, 1)})
    assert text.splitlines()[-2:] == ["ranks 0, 2: 5x4, dim 0 [0:5]", "ranks 1, 3: 1x4, dim 0 [5:6]"]
    assert shown((6, 4), 2, [Replicate()]).splitlines()[1:] == ["ranks 0, 1: 6x4, all of it"]
    contributions = shown((6, 4), 2, [Partial()]).splitlines()[1:]
    assert contributions == ["ranks 0, 1: 6x4, all of it, a contribution from each rank"]
    assert shown((0, 4), 2, [Shard(0)]).splitlines()[1:] == [
        "rank 0: 0x4, dim 0 [0:0], empty",
        "rank 1: 0x4, dim 0 [0:0], empty",
    ]


def large():
    x = shard(torch.zeros(1000), shared_mesh(500), [Shard(0)])
    return shardtensor.visualize(x)


def test_a_large_world_is_shortened():
    (text,) = simulate_ranks(large, 500, only=[7])
    assert "... 436 more" in text and text.splitlines()[-1] == "rank 499: 2, dim 0 [998:1000]"


def of_dtensor():
    return shardtensor.visualize(DTensor.from_local(torch.zeros(2, 3), shared_mesh(2), [Shard(0)], run_check=False))


def test_a_dtensor_and_a_spec():
    (text,) = simulate_ranks(of_dtensor, 2, only=[1])
    assert text.splitlines()[-1] == "rank 1: 2x3, dim 0 [2:4]"


def pixels(path):
    from matplotlib.image import imread

    return imread(path)[..., :3]


@pytest.mark.parametrize(
    "shape, mesh, placements, sizes, colors",
    [
        ((40, 20), 3, [Shard(0)], {0: (10, 0, 30)}, 2),
        ((40, 20), (2, 2), [Shard(0), Shard(1)], {0: (30, 10), 1: (5, 15)}, 4),
    ],
    ids=["rows", "tiles"],
)
def test_a_picture(tmp_path, shape, mesh, placements, sizes, colors):
    """Its areas are to scale: each rank's color covers its share of the plane."""
    pytest.importorskip("matplotlib")
    shown(shape, mesh, placements, sizes, path=tmp_path / "shards.png")
    image = torch.tensor(pixels(tmp_path / "shards.png"))
    found, counts = (image * 255).round().long().reshape(-1, 3).unique(dim=0, return_counts=True)
    tinted = counts[(found.max(1).values - found.min(1).values) > 25].sort(descending=True).values[:colors]
    lengths = [[n for n in sizes[m] if n] for m in sizes]
    areas = [a * b for a in lengths[0] for b in (lengths[1] if len(lengths) > 1 else [1])]
    shares = torch.tensor(sorted(areas, reverse=True)) / sum(areas)
    assert torch.allclose(tinted / tinted.sum(), shares, atol=0.03)


def refusing(call):
    x = shard(torch.zeros(4, 4), shared_mesh(2), [Shard(0)])
    replicated = shard(torch.zeros(4, 4), shared_mesh(2), [Replicate()])
    return call(x, replicated)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x, _: shardtensor.visualize(x, halo={1: 1}), ValueError, "not sharded"),
        (lambda x, _: shardtensor.visualize(x, halo=-1), ValueError, "none below 0"),
        (lambda x, _: shardtensor.visualize(x, halo=(1, 2)), ValueError, "a number of elements, or {dim"),
        (lambda x, _: shardtensor.visualize(x.to_local()), TypeError, "not Tensor"),
        (lambda _, r: shardtensor.visualize(r, path="none.png"), ValueError, "nothing to draw"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        simulate_ranks(refusing, 2, call, only=[0])


def held():
    mesh = shared_mesh((2, 2))
    tiles = shard(torch.zeros(4, 6), mesh, [Shard(0), Shard(1)], {0: (3, 1), 1: (2, 4)})
    return [repr(t).splitlines()[0] for t in (tiles, tiles.sum(), tiles.redistribute(placements=[Replicate()] * 2))]


def test_repr_says_what_the_rank_holds():
    texts = simulate_ranks(held, 4, only=[3])[0]
    assert texts[0].endswith("as (S(0)[3, 1], S(1)[2, 4]), rank (1, 1) holds [3:4, 2:6]")
    assert texts[1].endswith("rank (1, 1) holds a contribution")
    assert texts[2].endswith("rank (1, 1) holds all of it")


def tables():
    mesh = init_device_mesh("cpu", (2, 20), mesh_dim_names=("<h>", "w"))
    sizes = {0: (0, 4), 1: tuple(range(20))}
    local = torch.zeros(sizes[0][mesh.get_local_rank(0)], mesh.get_local_rank(1))
    x = shardtensor.ShardTensor.from_local(local, mesh, [Shard(0), Shard(1)], shard_sizes=sizes)
    summed = x.sum(0)
    with count_communication() as counted:
        texts = [t._repr_html_() for t in (x, summed, shardtensor.visualize(x))]
    assert counted == type(counted)()
    return texts


def cells_of(row):
    return "".join(f"<td>{cell}</td>" for cell in row)


def test_notebooks_show_the_sizes_of_shards():
    tiles, summed, drawn = simulate_ranks(tables, 40, only=[23])[0]
    assert drawn.startswith("<pre>ShardTensor(4, 190) float32 on mesh (2, 20)") and drawn.endswith("</pre>")
    caption = "ShardTensor (4, 190) float32 on mesh (2, 20) of cpu, rank (1, 3) holds [0:4, 3:6]"
    assert f"<caption>{caption}</caption>" in tiles
    assert tiles.count("<tr>") == 2
    assert cells_of(["mesh dim 0 &#x27;&lt;h&gt;&#x27;", "Shard(dim=0)", 0, "<b>4</b>"]) in tiles
    ends = [0, 1, 2, "<b>3</b>", 4, 5, 6, 7, "...", *range(12, 20)]
    assert cells_of(["mesh dim 1 &#x27;w&#x27;", "Shard(dim=1)", *ends]) in tiles
    assert f"<tr>{cells_of(['mesh dim 0 &#x27;&lt;h&gt;&#x27;', 'Partial(sum)'])}</tr>" in summed

"""Wrong input: a clear error on every rank, and no hang."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor, scatter_tensor
from shardtensor.debug import check
from shardtensor.testing import run_expecting_errors, shared_mesh

pytestmark = pytest.mark.every_run


ones, build = torch.ones, ShardTensor.from_local
CALLS = {
    "sum": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(0)], shard_sizes={0: (5, 3)}),
    "count": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(0)], shard_sizes={0: (4, 2, 2)}),
    "negative": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(0)], shard_sizes={0: (9, -5)}),
    "fractions": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(0)], shard_sizes={0: (4.7, 3.3)}),
    "names": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(0)], shard_sizes={1: (4, 4)}),
    "unsharded": lambda mesh, rank: build(ones(4, 2), mesh, [Replicate()], shard_sizes={0: (4, 4)}),
    "dtype": lambda mesh, rank: build(ones(4, dtype=(torch.float32, torch.float64)[rank]), mesh, [Shard(0)]),
    "ndim": lambda mesh, rank: build(ones(4) if rank else ones(4, 1), mesh, [Shard(0)]),
    "other dims": lambda mesh, rank: build(ones(4, 2 + rank), mesh, [Shard(0)]),
    "replicate": lambda mesh, rank: build(ones(4 + rank), mesh, [Replicate()]),
    "placements": lambda mesh, rank: build(ones(4, 4), mesh, [Shard(rank)]),
    "no such dim": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(2)]),
    "no such negative dim": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(-3)], shard_sizes="even"),
    "too many": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(0), Shard(1)]),
    "too few": lambda mesh, rank: build(ones(4, 2), mesh, []),
    "no placement": lambda mesh, rank: build(ones(4, 2), mesh, [0]),
    "not a sequence": lambda mesh, rank: build(ones(4, 2), mesh, Shard(0)),
    "average": lambda mesh, rank: build(ones(4, 2), mesh, [Partial("avg")]),
    "device": lambda mesh, rank: build(ones(4, 2, device="meta"), mesh, [Shard(0)]),
    "device given": lambda mesh, rank: build(ones(4, 2, device="meta"), mesh, [Shard(0)], shard_sizes="even"),
    "no tensor": lambda mesh, rank: build([1.0] if rank else ones(4), mesh, [Shard(0)]),
    "shardtensor": lambda mesh, rank: build(build(ones(4), mesh, [Shard(0)]), mesh, [Shard(0)]),
    "integer": lambda mesh, rank: build(ones(4, dtype=torch.int64), mesh, [Shard(0)]).requires_grad_(),
    "no mesh": lambda mesh, rank: build(ones(4)),
    "no mesh but a size": lambda mesh, rank: build(ones(4, 2), 2, [Shard(0)]),
    "no mesh but a group": lambda mesh, rank: build(ones(4, 2), mesh.get_group(), [Shard(0)]),
    "nested": lambda mesh, rank: build(torch.nested.nested_tensor([ones(2), ones(3)]), mesh, [Shard(0)]),
    "plain as DTensor": lambda mesh, rank: ShardTensor.from_dtensor(ones(4)),
    "layouts of a gradient": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(0)]).to_local(
        grad_placements=[Shard(0), Replicate()]
    ),
    "sizes type": lambda mesh, rank: build(ones(4, 2), mesh, [Shard(0)], shard_sizes={4}),
}


FROM_LOCAL = [
    ("sum", ValueError, "shape (4, 2), but shard_sizes (5, 3) of mesh dim 0 say"),
    ("count", ValueError, "3 shard sizes (4, 2, 2) for mesh dim 0, which has 2 ranks"),
    ("negative", ValueError, "negative shard size in (9, -5)"),
    ("fractions", TypeError, "shard sizes must be integers, not (4.7, 3.3)"),
    ("names", ValueError, "mesh dim"),
    ("unsharded", ValueError, "only Shard has sizes"),
    ("dtype", ValueError, "do not agree on the dtype: torch.float32 on rank 0, torch.float64 on rank 1"),
    ("ndim", ValueError, "do not agree on the number of dims: 2 on rank 0, 1 on rank 1"),
    ("other dims", ValueError, "size of tensor dim 1, which is not sharded: 2 on rank 0, 3 on rank 1"),
    ("replicate", ValueError, "size of tensor dim 0, which is not sharded: 4 on rank 0, 5 on rank 1"),
    ("placements", ValueError, "do not agree on the placements"),
    ("no such dim", ValueError, "Shard(2) on mesh dim 0: the tensor has only 2 dims"),
    ("no such negative dim", ValueError, "Shard(-3) on mesh dim 0: the tensor has only 2 dims"),
    ("too many", ValueError, "2 placements"),
    ("too few", ValueError, "0 placements"),
    ("no placement", TypeError, "placement 0 of mesh dim 0 is not a Placement; use Shard(dim)"),
    ("not a sequence", TypeError, "one entry per mesh dim"),
    ("average", ValueError, "not exact on unequal shards"),
    ("device", ValueError, "has no values for the mesh's device 'c"),
    ("device given", ValueError, "has no values for the mesh's device 'c"),
    ("no tensor", TypeError, "rank 1: the local tensor must be a torch.Tensor"),
    ("shardtensor", TypeError, "DTensor already; use ShardTensor.from_dtensor"),
    ("integer", RuntimeError, "floating point"),
    ("no mesh", RuntimeError, "mesh"),
    ("no mesh but a size", TypeError, "the mesh must be a DeviceMesh, as init_device_mesh makes one, not int 2"),
    ("no mesh but a group", TypeError, "must be a DeviceMesh, as init_device_mesh makes one, not ProcessGroup"),
    ("nested", TypeError, "is sparse, nested or quantized"),
    ("plain as DTensor", TypeError, "from_dtensor takes a DTensor, not Tensor; use from_local"),
    ("layouts of a gradient", ValueError, "2 placements"),
    ("sizes type", TypeError, "must be sizes, a dict {mesh_dim: sizes}"),
]


def from_local(case):
    CALLS[case](shared_mesh(2), dist.get_rank())


@pytest.mark.parametrize(("case", "kind", "text"), FROM_LOCAL, ids=[case for case, *_ in FROM_LOCAL])
def test_from_local_says_what_is_wrong_on_every_rank(case, kind, text):
    for error in run_expecting_errors(from_local, 2, case):
        assert isinstance(error, kind) and text in str(error), repr(error)


def misfit_on_one_rank():
    """The second rank holds 4 rows where the sizes that all have given say 3."""
    rank = dist.get_rank()
    sizes = {0: (5, 3)}
    ShardTensor.from_local(torch.ones(5 - rank, 2), shared_mesh(2), [Shard(0)], shard_sizes=sizes)


def debugging(fn, *args):
    os.environ["SHARDTENSOR_DEBUG"] = "1"
    try:
        fn(*args)
    finally:
        del os.environ["SHARDTENSOR_DEBUG"]


def test_a_misfit_with_given_sizes_is_seen_where_it_is():
    first, second = run_expecting_errors(misfit_on_one_rank, 2)
    assert first is None
    assert isinstance(second, ValueError) and "rank 1 along it holds 3 in tensor dim 0" in str(second)


def test_debugging_shows_a_misfit_to_every_rank():
    for error in run_expecting_errors(debugging, 2, misfit_on_one_rank):
        assert isinstance(error, ValueError)
        assert "(5, 3) of mesh dim 0 do not match the local tensors, which have sizes (5, 4)" in str(error)


def different_sizes_given():
    sizes = {0: ((5, 3), (4, 4))[dist.get_rank()]}
    ShardTensor.from_local(torch.ones(5 if dist.get_rank() == 0 else 4), shared_mesh(2), [Shard(0)], shard_sizes=sizes)


def test_debugging_shows_that_ranks_give_different_sizes():
    for error in run_expecting_errors(debugging, 2, different_sizes_given):
        assert isinstance(error, ValueError) and "do not agree on the placements or shard_sizes" in str(error)
        assert "shard_sizes={0: (5, 3)} on rank 0" in str(error)
        assert "shard_sizes={0: (4, 4)} on rank 1" in str(error)


def inconsistent_grid():
    """Ranks that share a place on one mesh dim must hold equally much."""
    mesh = shared_mesh((2, 2))
    ShardTensor.from_local(torch.ones(4 if dist.get_rank() == 3 else 2), mesh, [Replicate(), Shard(0)])


def test_ranks_that_share_a_place_must_agree():
    for error in run_expecting_errors(inconsistent_grid, 4):
        assert isinstance(error, ValueError)
        assert "[1, 3] share position 1 of mesh dim 1" in str(error) and "[2, 4]" in str(error)


def outside(what):
    grid = shared_mesh((2, 2))
    half = shared_mesh((2, 2), ("data", "domain"))["domain"]
    if what == "from_local" and dist.get_rank() > 1:
        from torch.distributed.device_mesh import DeviceMesh

        foreign = DeviceMesh(torch.get_default_device().type, [0, 1], _init_backend=False)
        ShardTensor.from_local(torch.ones(2), foreign, [Shard(0)], shard_sizes="even")
    if what == "scatter":
        source = 3 if dist.get_rank() < 2 else 0  # each half names a rank of the other
        scatter_tensor(torch.ones(4), half, [Shard(0)], source=source)
    if what == "two mesh dims":
        ShardTensor.from_local(torch.ones(4, 4), grid, [Shard(1), Shard(-1)])
    if what == "strided":
        from torch.distributed.tensor.placement_types import _StridedShard

        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        ShardTensor.from_local(torch.ones(4, 4), grid, placements, shard_sizes="even")


def test_a_mesh_must_hold_this_rank():
    inside_0, inside_1, *errors = run_expecting_errors(outside, 4, "from_local")
    assert inside_0 is inside_1 is None
    for rank, error in enumerate(errors, 2):
        assert isinstance(error, ValueError) and f"this rank ({rank}) is not in the mesh [0, 1]" in str(error)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("scatter", "is not in the mesh"),
        ("two mesh dims", "tensor dim 1 is sharded on mesh dims 0 and 1; shard it on one mesh dim only"),
        ("strided", "strided shards are not supported"),
    ],
)
def test_layouts_on_grids_that_cannot_be(what, text):
    for error in run_expecting_errors(outside, 4, what):
        assert isinstance(error, ValueError) and text in str(error), repr(error)


GIVEN = {"global_shape": (8,), "dtype": torch.float32}


def whole(one, n=8, **options):
    """What the source, which is the first rank, gives; the other gives None."""
    return torch.ones(n, **options) if one else None


SCATTERS = {
    "none": lambda mesh, one: scatter_tensor(None, mesh, [Shard(0)]),
    "none, meta given": lambda mesh, one: scatter_tensor(None, mesh, [Shard(0)], **GIVEN),
    "other shape": lambda mesh, one: scatter_tensor(whole(one, 9), mesh, [Shard(0)], **GIVEN),
    "other dtype": lambda mesh, one: scatter_tensor(whole(one, dtype=torch.float64), mesh, [Shard(0)], **GIVEN),
    "other shape, dtype not given": lambda mesh, one: scatter_tensor(whole(one), mesh, [Shard(0)], global_shape=(9,)),
    "device": lambda mesh, one: scatter_tensor(whole(one, device="meta"), mesh, [Shard(0)]),
    "device, meta given": lambda mesh, one: scatter_tensor(whole(one, device="meta"), mesh, [Shard(0)], **GIVEN),
    "sizes": lambda mesh, one: scatter_tensor(whole(one), mesh, [Shard(0)], shard_sizes={0: (5, 4)}),
    "fractions": lambda mesh, one: scatter_tensor(whole(one), mesh, [Shard(0)], shard_sizes={0: (5.7, 2.3)}),
    "no such dim": lambda mesh, one: scatter_tensor(whole(one), mesh, [Shard(1)]),
    "partial": lambda mesh, one: scatter_tensor(whole(one), mesh, [Partial()]),
    "source, a fraction": lambda mesh, one: scatter_tensor(whole(True), mesh, [Shard(0)], source=0.0),
    "swapped": lambda mesh, one: scatter_tensor(whole(True), 0, [Shard(0)], source=mesh),
    "source": lambda mesh, one: scatter_tensor(whole(True), mesh, [Shard(0)], source=7),
    "integer": lambda mesh, one: scatter_tensor(whole(one, dtype=torch.int64), mesh, [Shard(0)], requires_grad=True),
    "placements": lambda mesh, one: scatter_tensor(whole(one), mesh, [Shard(0), Shard(0)]),
    "shardtensor": lambda mesh, one: scatter_tensor(build(whole(True), mesh, [Shard(0)]), mesh, [Shard(0)]),
    "sparse": lambda mesh, one: scatter_tensor(whole(one).to_sparse() if one else None, mesh, [Shard(0)]),
}


SCATTER = [
    ("none", TypeError, "source rank 0 reports a problem: its tensor must be a torch.Tensor"),
    ("none, meta given", (TypeError, ValueError), "source rank 0"),
    ("other shape", ValueError, "not of the given global_shape and dtype"),
    ("other dtype", ValueError, "not of the given global_shape and dtype"),
    ("other shape, dtype not given", ValueError, "not of the given global_shape and dtype"),
    ("device", ValueError, "has no values for the mesh's device 'c"),
    ("device, meta given", ValueError, "on the meta device"),
    ("sizes", ValueError, "add up to 9, but tensor dim 0 has size 8"),
    ("fractions", TypeError, "shard sizes must be integers, not (5.7, 2.3)"),
    ("no such dim", ValueError, "the tensor has only 1 dims"),
    ("partial", ValueError, "only Shard and Replicate"),
    ("source", ValueError, "source=7 is not in the mesh [0, 1]"),
    ("source, a fraction", TypeError, "source must be a rank, an integer, not 0.0"),
    ("swapped", TypeError, "the mesh must be a DeviceMesh, as init_device_mesh makes one, not int 0"),
    ("integer", RuntimeError, "only floating point and complex tensors can require gradients"),
    ("placements", ValueError, "2 placements"),
    ("shardtensor", TypeError, "its tensor is a DTensor already"),
    ("sparse", TypeError, "its tensor is sparse, nested or quantized; pass a dense tensor"),
]


def scatter(case):
    SCATTERS[case](shared_mesh(2), dist.get_rank() == 0)


NO_SPARSE = pytest.mark.not_emulated("whose sparse tensors are the CPU's")


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [pytest.param(*case, marks=NO_SPARSE if case[0] == "sparse" else ()) for case in SCATTER],
    ids=[case for case, *_ in SCATTER],
)
def test_scatter_says_what_is_wrong_on_every_rank(case, kind, text):
    errors = run_expecting_errors(scatter, 2, case)
    assert all(isinstance(error, kind) for error in errors), errors
    # Where the shards themselves carry the bad news, only the source knows the details.
    assert any(text in str(error) for error in errors), errors
    assert all("source rank 0" in str(error) or text in str(error) for error in errors), errors


def scatter_differently(what):
    mesh, rank = shared_mesh(3), dist.get_rank()
    last = rank == 2
    arguments = {"source": 0, "placements": [Shard(0)], "shard_sizes": {0: (3, 3, 2)}}
    if last:
        other = {"source": 2, "placements": [Shard(1)], "shard_sizes": {0: [2, 3, 3]}, "requires_grad": True}
        arguments[what] = other[what]
    scatter_tensor(torch.ones(8, 8), mesh=mesh, **arguments)


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("source", "source=0, ", "source=2, "),
        ("placements", "placements=(Shard(dim=0),)", "placements=(Shard(dim=1),)"),
        ("shard_sizes", "shard_sizes={0: (3, 3, 2)}", "shard_sizes={0: (2, 3, 3)}"),
        ("requires_grad", "requires_grad=False", "requires_grad=True"),
    ],
)
def test_scatter_shows_arguments_that_differ_to_every_rank(what, first, second):
    for error in run_expecting_errors(scatter_differently, 3, what):
        assert isinstance(error, ValueError) and "do not agree on the arguments of scatter_tensor" in str(error)
        said_first, said_second = str(error).split(" on ranks 0, 1")
        assert first in said_first and second in said_second and "on rank 2; every rank must pass" in said_second


def scatter_differently_with_meta():
    sizes = ((5, 3), (4, 4))[dist.get_rank()]
    given = {"global_shape": (8,), "dtype": torch.float32}
    scatter_tensor(torch.ones(8), shared_mesh(2), [Shard(0)], shard_sizes={0: sizes}, **given)


def test_debugging_compares_the_arguments_of_scatter_where_nothing_else_is_gathered():
    for error in run_expecting_errors(debugging, 2, scatter_differently_with_meta):
        assert isinstance(error, ValueError)
        assert "{0: (5, 3)}" in str(error) and "{0: (4, 4)}" in str(error)


def test_without_a_process_group_the_error_tells_how_to_start():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"torchrun and call torch.distributed.init_process_group\(\)"):
        ShardTensor.from_local(torch.ones(2), object(), [Shard(0)])
    with pytest.raises(RuntimeError, match="needs a process group"):
        scatter_tensor(torch.ones(2), object(), [Shard(0)])


def different_meshes():
    a, b = shared_mesh(2), shared_mesh((1, 2))
    x = ShardTensor.from_local(torch.ones(3), a, [Shard(0)])
    y = ShardTensor.from_local(torch.ones(3), b, [Replicate(), Shard(0)])
    x + y


def test_operands_on_different_meshes_are_refused():
    for error in run_expecting_errors(different_meshes, 2):
        assert isinstance(error, NotImplementedError) and "different meshes" in str(error)


@on_ranks(2)
def test_after_all_these_errors_the_ranks_still_agree():
    x = ShardTensor.from_local(torch.ones(3 + dist.get_rank()), shared_mesh(2), [Shard(0)])
    assert x.sum().item() == 7.0


def resized_in_place():
    x = ShardTensor.from_local(torch.ones(4, 2), shared_mesh(2), [Shard(0)], shard_sizes={0: (4, 4)})
    x.to_local().resize_(2, 2)  # another tensor with the same memory, as detach() returns
    assert (x + 1).to_local().shape == (4, 2)
    x._local_tensor.resize_(2, 2)
    return x + 1


def test_a_local_tensor_that_was_resized_in_place_is_an_error():
    for error in run_expecting_errors(resized_in_place, 2):
        assert isinstance(error, RuntimeError) and "make a new ShardTensor with from_local instead" in str(error)
        assert "the local tensor has shape (2, 2) instead of (4, 2)" in str(error)


def destroyed(case):
    """On a mesh of its own group, that of the pool stays."""
    group = dist.new_group(list(range(2)))
    mesh = DeviceMesh.from_group(group, torch.get_default_device().type)
    x = ShardTensor.from_local(torch.ones(1, 1, 4, 4), mesh, [Shard(2)]).requires_grad_()
    y = F.conv2d(x, torch.ones(1, 1, 3, 3), padding=1)
    dist.destroy_process_group(group)
    match case:
        case "operator":
            F.conv2d(x, torch.ones(1, 1, 5, 5), padding=2)
        case "number":
            y.sum().item()
        case "redistribute":
            x.redistribute(placements=[Shard(3)])
        case "full_tensor":
            x.full_tensor()
        case "check":
            check(torch.nn.Linear(2, 2), mesh=mesh)


@pytest.mark.parametrize("case", ("operator", "number", "redistribute", "full_tensor", "check"))
def test_a_mesh_whose_group_was_destroyed_is_named(case):
    for error in run_expecting_errors(destroyed, 2, case):
        assert isinstance(error, RuntimeError) and "the process group of this mesh has been destroyed" in str(error)


def losses_of_different_meshes():
    a, b = shared_mesh(2), shared_mesh((1, 2))
    torch.stack([ShardTensor.from_local(torch.ones(3), a, [Shard(0)]).mean(), from_both(b).mean()])


def from_both(mesh):
    return ShardTensor.from_local(torch.ones(3), mesh, [Replicate(), Shard(0)])


def test_losses_of_different_meshes_are_refused_with_what_to_call():
    for error in run_expecting_errors(losses_of_different_meshes, 2):
        assert "different meshes" in str(error) and "loss.full_tensor()" in str(error)
        assert "shardtensor.parallel.clip_grad_norm_" in str(error)

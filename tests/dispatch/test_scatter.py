"""scatter_tensor: the right shard for everyone, and nothing more."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import RanksDiffer, ShardTensor, distribute_tensor, gather_tensor, scatter_tensor
from shardtensor.dispatch import scatter
from shardtensor.layout import caches
from shardtensor.testing import count_communication, run_distributed, shared_mesh

DTYPES = [torch.float64, torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.complex64]
CUTS = [
    ([Shard(0), Shard(2)], {0: (6, 1), 1: (0, 5)}),
    ([Shard(2), Shard(0)], {0: (2, 3)}),
    ([Replicate(), Shard(-2)], {1: (1, 2)}),
    ([Shard(1), Replicate()], None),
    ([Replicate(), Replicate()], None),
    ([Shard(0), Shard(1)], "even"),
]


def source_tensor(dtype=torch.float64):
    values = torch.randint(0, 99, (7, 3, 5), generator=seeded(0))
    return (values % 2).bool() if dtype == torch.bool else values.to(dtype)


def expected_shard(whole, x):
    at = x.device_mesh.get_coordinate()
    for m, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            sizes = x.shard_sizes[m]
            whole = whole.narrow(placement.dim, sum(sizes[: at[m]]), sizes[at[m]])
    return whole


@on_ranks(4)
def test_only_the_source_has_data():
    """Only the source has data; the others pass None."""
    mesh = shared_mesh((2, 2))
    for source in range(4):
        for placements, sizes in CUTS:
            for dtype in DTYPES if source == 2 else DTYPES[:1]:
                whole = source_tensor(dtype)
                given = whole if dist.get_rank() == source else None
                x = scatter_tensor(given, mesh, placements, shard_sizes=sizes, source=source)
                assert x.shape == whole.shape and x.dtype == dtype and not x.requires_grad
                local = x.to_local()
                assert torch.equal(local, expected_shard(whole, x)), (source, placements, sizes, dtype)
                assert local.is_contiguous()


@on_ranks(2)
def test_sources_of_any_kind():
    """Sources that are not contiguous, that require grad, that are conjugated, of no dims, and empty."""
    mesh = shared_mesh(2)
    base = torch.randn(5, 6, dtype=torch.complex128, generator=seeded(0))
    first = dist.get_rank() == 0
    for view in (base.t(), base[::2], base[:, 1:4], base[:1].expand(4, 6), base.conj(), base[:0]):
        x = scatter_tensor(view if first else None, mesh, [Shard(0)])
        assert torch.equal(x.full_tensor(), view.resolve_conj()), view.shape
    scalar = scatter_tensor(torch.tensor(3.5) if first else None, mesh, [Replicate()])
    assert scalar.shape == () and scalar.item() == 3.5
    trained = scatter_tensor(torch.ones(4, requires_grad=True) * 2 if first else None, mesh, [Shard(0)])
    assert not trained.requires_grad and trained.is_leaf  # scattering starts a graph, it does not continue one
    # What the others pass is not looked at.
    x = scatter_tensor(torch.ones(4) if first else torch.zeros(9, 9), mesh, [Shard(0)])
    assert torch.equal(x.to_local(), torch.ones(2))


@on_ranks(4)
def test_sub_meshes_without_rank_0():
    grid = shared_mesh((2, 2), ("data", "domain"))
    planes = shared_mesh((2, 2, 1), ("data", "domain", "one"))["domain", "one"]  # no process group has just its ranks
    for mesh in (grid["data"], grid["domain"], planes, planes):
        ranks = mesh.mesh.flatten().tolist()
        source = ranks[1]  # for the second group neither rank 0 nor the first of its own
        whole = source_tensor() + source
        placements = [Shard(0), Shard(1)][: mesh.ndim]
        x = scatter_tensor(
            whole if dist.get_rank() == source else None, mesh, placements, shard_sizes={0: (2, 5)}, source=source
        )
        assert torch.equal(x.to_local(), expected_shard(whole, x))


@on_ranks(3)
def test_a_rank_receives_its_shard_and_one_element():
    mesh = shared_mesh(3)
    rank = dist.get_rank()
    whole = source_tensor() if rank == 1 else None
    sizes = (2, 4, 1)
    row = 3 * 5 * 8
    given = {"global_shape": (7, 3, 5), "dtype": torch.float64}
    scatter_tensor(
        whole, mesh, [Shard(0)], **given, source=1
    )  # the group's first messages, for which NCCL connects all ranks
    with count_communication() as counted:
        x = scatter_tensor(whole, mesh, [Shard(0)], shard_sizes={0: sizes}, **given, source=1)
    # The shard, and one element that says whether the source could send.
    if rank == 1:
        assert counted.messages == 2 and counted.bytes_sent == 3 * row + 2 * 8
        assert dict(counted.sent_to) == {0: 2 * row + 8, 2: row + 8}
        assert counted.received_messages == 0
    else:
        assert (counted.received_messages, counted.bytes_received) == (1, sizes[rank] * row + 8)
        assert counted.messages == 0
    assert not counted.collectives
    # Nothing keeps more than the shard alive.
    assert x.to_local().untyped_storage().nbytes() <= sizes[rank] * row + 8
    with count_communication() as with_header:
        scatter_tensor(whole, mesh, [Shard(0)], shard_sizes={0: sizes}, source=1)
    assert with_header.messages == counted.messages
    assert dict(with_header.collectives) == {"all_gather": 1}
    assert with_header.collective_bytes < 256


def batches(limit):
    mesh, started = shared_mesh(4), []
    start = scatter.c10d_messages

    def noted(recvs, sends, group):
        assert group is mesh.get_group(), "messages of another group connect each two of its ranks"
        started.append(len(recvs) + len(sends))
        return start(recvs, sends, group)

    whole = source_tensor() if dist.get_rank() == 2 else None
    single = mock.patch.object(dist, "send", side_effect=AssertionError("a message by itself"))
    with single, mock.patch.object(scatter, "c10d_messages", noted), mock.patch.object(scatter, "_TOGETHER", limit):
        x = scatter_tensor(whole, mesh, [Shard(0)], shard_sizes={0: (4, 1, 1, 1)}, source=2)
    assert torch.equal(x.full_tensor(), source_tensor())
    return started


@pytest.mark.parametrize("limit, batched", [(1 << 23, [3]), (500, [2, 1])])
def test_messages_are_batched_up_to_a_size(limit, batched):
    """The source holds no second copy of all shards."""
    assert run_distributed(batches, 4, limit) == [[1], [1], batched, [1]]


def test_large_shards_are_sent_in_parts():
    """Of (4, 3, 5) and (1, 3, 5) elements the longest dim has 5, in lengths of 2, 2 and 1."""
    assert run_distributed(batches, 4, 1) == [[1] * 3, [1] * 3, [1] * 9 + [0], [1] * 3]


# -- an accelerator that cannot hold the global tensor -----------------------------------------------------------------


def from_the_host(sizes):
    """The source's tensor is the host's; what comes back is, too. Memory and copies of the device are counted."""
    from device.emulated import counted

    mesh, cuda = shared_mesh(len(sizes)), torch.cuda
    whole = torch.arange(3 * sum(sizes) * 512.0, device="cpu").view(3, -1, 512)
    given = whole.requires_grad_() if mesh.get_local_rank() == 1 else None
    shard_bytes = 3 * max(sizes) * 512 * 4
    with mock.patch.object(scatter, "_TOGETHER", 3000):
        scatter_tensor(given, mesh, [Shard(1)], shard_sizes={0: sizes}, source=1)  # connects the ranks
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        with counted() as seen:
            x = scatter_tensor(
                given, mesh, [Shard(1)], shard_sizes={0: sizes}, global_shape=whole.shape, dtype=whole.dtype, source=1
            )
        assert seen.total("sync") <= 1 and not any("pageable" in name for _, name in seen.events), seen.of("sync")
        if given is not None:
            # A copy for each of the messages, of which each of the others' shards is four, and those of its own shard.
            assert seen.total("h2d") == 4 * sum(n > 0 for n in sizes), seen.of("h2d")
        assert cuda.max_memory_allocated() - before <= 1.3 * shard_bytes
        assert x.device.type == "cuda" and torch.equal(x.to_local().cpu(), expected_shard(whole.detach(), x))
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        gathered = gather_tensor(x, device="cpu")
        assert cuda.max_memory_allocated() - before <= 0.3 * shard_bytes
        if gathered is not None:
            assert gathered.device.type == "cpu" and torch.equal(gathered, whole)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (12, 5, 7)])
def test_no_device_holds_the_global_tensor(sizes, emulated):
    run_distributed(from_the_host, len(sizes), sizes, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8,) * 8, (9, 12, 7, 0, 10, 8, 1, 12)])
def test_no_device_of_eight_holds_the_global_tensor(sizes, emulated):
    run_distributed(from_the_host, 8, sizes, timeout=300)


@on_ranks(2)
def test_requires_grad_makes_a_leaf():
    mesh = shared_mesh(2)
    first = dist.get_rank() == 0
    whole = source_tensor()
    x = scatter_tensor(whole if first else None, mesh, [Shard(0)], shard_sizes={0: (6, 1)}, requires_grad=True)
    assert x.is_leaf and x.requires_grad
    (x * x).sum().backward()
    assert x.grad.shard_sizes == x.shard_sizes
    assert torch.equal(x.grad.full_tensor(), 2 * whole)


@on_ranks(2)
def test_the_source_may_reuse_its_tensor():
    mesh = shared_mesh(2)
    whole, kept = source_tensor(), source_tensor()
    x = scatter_tensor(whole if dist.get_rank() == 0 else None, mesh, [Replicate()])
    whole.zero_()  # the source's shard is its own copy
    assert torch.equal(x.to_local(), kept)


@pytest.mark.parametrize("sizes", [(8, 0), (0, 8), (7, 1)])
@on_ranks(2)
def test_uneven_and_empty_shards(sizes):
    whole = torch.arange(8.0)
    x = scatter_tensor(
        whole if dist.get_rank() == 1 else None, shared_mesh(2), [Shard(0)], shard_sizes={0: sizes}, source=1
    )
    assert x.to_local().shape == (sizes[dist.get_rank()],)
    assert torch.equal(x.full_tensor(), whole)


@on_ranks(4)
def test_the_surrounding_mesh_is_the_default():
    grid = shared_mesh((2, 2), ("data", "domain"))
    whole = source_tensor()
    given = whole if dist.get_rank() == 3 else None
    with grid:
        x = scatter_tensor(given, placements=[Shard(0), Shard(2)], shard_sizes={0: (6, 1)}, source=3)
        assert x.device_mesh == grid and torch.equal(x.to_local(), expected_shard(whole, x))
        assert torch.equal(scatter_tensor(given, source=3).to_local(), whole)
        with grid["domain"] as mesh:  # the innermost counts
            source = dist.get_global_rank(mesh.get_group(), 1)
            x = scatter_tensor(whole if dist.get_rank() == source else None, placements=[Shard(0)], source=source)
            assert x.device_mesh == mesh and torch.equal(x.to_local(), expected_shard(whole, x))
        other = scatter_tensor(given, shared_mesh(4), [Shard(0)], source=3)  # one that is named does before any
        assert other.device_mesh == shared_mesh(4)
    with pytest.raises(RuntimeError, match=r"no mesh was given.*with mesh"):
        scatter_tensor(given, placements=[Shard(0)], source=3)


@on_ranks(4)
def test_one_rank_gets_the_global_tensor():
    mesh = shared_mesh((2, 2))
    here = dist.get_rank()
    for destination in range(4):
        for placements, sizes in CUTS:
            whole = source_tensor(torch.complex128)
            x = scatter_tensor(whole if here == 1 else None, mesh, placements, shard_sizes=sizes, source=1).conj()
            with count_communication() as counted:
                gathered = gather_tensor(x.requires_grad_(), destination=destination)
            assert (gathered is None) == (here != destination)
            if gathered is None:
                sent = counted.bytes_sent
                assert sent in (0, x.to_local().nbytes) and counted.messages == (sent > 0) and not counted.collectives
            else:
                assert torch.equal(gathered, whole.conj()) and not gathered.requires_grad and gathered.is_contiguous()


@on_ranks(2)
def test_contributions_are_reduced_on_their_way_to_one_rank():
    mesh = shared_mesh(2)
    x = ShardTensor.from_local(torch.full((3,), 1.5, dtype=torch.bfloat16), mesh, [Partial()])
    whole = gather_tensor(x, destination=1)
    assert (whole is None) == (dist.get_rank() == 0)
    assert whole is None or (whole.dtype == torch.bfloat16 and torch.equal(whole, torch.full_like(whole, 3.0)))
    for error, destination in ((ValueError, 2), (TypeError, 0.5)):
        with pytest.raises(error, match="destination"):
            gather_tensor(x, destination=destination)


# -- every rank has the global tensor ----------------------------------------------------------------------------------


@on_ranks(4)
def test_a_tensor_that_all_ranks_have_is_cut():
    """The values are those of one rank, or where None is named, each rank's own, which are the same."""
    mesh, rank = shared_mesh((2, 2)), dist.get_rank()
    for source in (0, 1, None):
        for placements, sizes in CUTS:
            whole = source_tensor()
            theirs = whole if source is None or rank == 3 * source else torch.zeros_like(whole)
            given = theirs.clone().requires_grad_()
            with count_communication() as counted:
                x = distribute_tensor(given, mesh, placements, shard_sizes=sizes, src_data_rank=source)
            assert source is not None or not counted.messages
            assert x.requires_grad and x.is_leaf and x.shape == whole.shape
            local = x.detach().to_local()
            assert torch.equal(local, expected_shard(whole, x)), (source, placements, sizes)
            assert local.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    for source in (2, -1):
        with pytest.raises(ValueError, match=rf"src_data_rank={source} is no rank along every dim of the mesh"):
            distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=source)
    for source in (0, None):
        with pytest.raises(ValueError, match=r"cannot place .*: only Shard and Replicate"):
            distribute_tensor(whole, mesh, [Shard(0), Partial()], src_data_rank=source)
        with pytest.raises(TypeError, match="distribute_tensor: the tensor is a DTensor already"):
            distribute_tensor(x, mesh, [Shard(0), Shard(1)], src_data_rank=source)


@on_ranks(2)
def test_ranks_that_cut_other_values_are_told():
    """Nothing was compared when the tensor was cut; reading a number does."""
    caches.forget()  # as a new process: only a mesh's first calls are looked at
    x = distribute_tensor(torch.full((4,), float(dist.get_rank())), shared_mesh(2), [Shard(0)], src_data_rank=None)
    with pytest.raises((RanksDiffer, RuntimeError), match="the replicated tensor of distribute_tensor"):
        x.sum().item()


@on_ranks(2)
def test_sizes_by_number_by_name_and_alone():
    mesh, whole = shared_mesh((1, 2), ("dp", "domain")), torch.arange(8.0)
    placements, rank = [Replicate(), Shard(0)], dist.get_rank()
    expected = ShardTensor.from_local(whole[:5] if rank == 0 else whole[5:], mesh, placements, shard_sizes={1: (5, 3)})
    for sizes in ({1: (5, 3)}, {-1: [5, 3]}, {"domain": (5, 3)}, (5, 3), [5, 3]):
        local = expected.to_local()
        made = [
            scatter_tensor(whole, mesh, placements, shard_sizes=sizes),
            distribute_tensor(whole, mesh, placements, shard_sizes=sizes, src_data_rank=None),
            ShardTensor.from_local(local, mesh, placements, shard_sizes=sizes),
            expected.redistribute(shard_sizes="even").redistribute(shard_sizes=sizes),
        ]
        assert all(x._spec == expected._spec for x in made), sizes
    with pytest.raises(ValueError, match=r"the mesh has no axis 'lat'; its axes are called \('dp', 'domain'\)"):
        expected.redistribute(shard_sizes={"lat": (5, 3)})
    with pytest.raises(ValueError, match=r"shard_sizes=\(5, 3\) .*: sizes alone need one mesh dim that shards"):
        expected.redistribute(placements=[Replicate(), Replicate()], shard_sizes=(5, 3))

"""From files to shards: one rank reads and scatters a batch ahead, or each rank reads its own slice."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import gc
import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from late_streams import LateStream, on_stream
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import register_dataclass
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from shardtensor import ShardTensor
from shardtensor.data import ShardLoader, SliceDataset, loader, read, write
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

AXES = ("dp", "domain")
ROOT = Path(__file__).parents[2]
Pair = collections.namedtuple("Pair", "first second")


device_of_meshes = None  # torch's default device


@contextlib.contextmanager
def host_program():
    """The program's own tensors are the host's, as samplers want it; those of meshes are on the ranks' devices."""
    global device_of_meshes
    device_of_meshes = torch.get_default_device().type
    try:
        with torch.device("cpu"):
            yield
    finally:
        device_of_meshes = None


def grid():
    return shared_mesh((2, 2), AXES, device_type=device_of_meshes)


def domain():
    return grid()["domain"]


def part(whole, x):
    """What this rank should hold of ``whole``."""
    for m, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            sizes, at = x.shard_sizes[m], x.device_mesh.get_coordinate()[m]
            whole = whole.narrow(placement.dim, sum(sizes[:at]), sizes[at])
    return whole


def check(x, whole, sizes=None):
    assert type(x) is ShardTensor and x.shape == whole.shape and x.dtype == whole.dtype and not x.requires_grad
    assert sizes is None or x.shard_sizes == sizes
    local = x.to_local()
    assert local.device.type == x.device_mesh.device_type and local.is_contiguous()
    assert torch.equal(local.cpu(), part(whole.cpu(), x))
    assert local.untyped_storage().nbytes() == local.nbytes  # nothing else is kept alive


# -- one rank reads: what arrives --------------------------------------------------------------------------------------


def numbers(*shape, seed=0, dtype=torch.float64):
    values = torch.randint(0, 99, shape, generator=seeded(seed))
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def nested(i):
    """A batch of everything; the ``i``-th has ``i`` rows."""
    return {
        "image": numbers(2, 7, 5, seed=i),
        "pair": Pair(numbers(i, 3, dtype=torch.bool), [numbers(i, 3, seed=9, dtype=torch.complex64).conj(), None]),
        "array": np.arange(6.0).reshape(2, 3).T,
        "number": torch.tensor(i),
        "about": ("sample", i, {"where": [i, 2.5]}),
    }


NESTED = {
    "image": (Shard(0), Shard(2)),
    "pair": (Shard(0), Replicate()),
    "array": (Replicate(), Shard(-2)),
    "number": (Replicate(), Replicate()),
}


@on_ranks(4)
def test_nested_batches_of_any_tensors():
    mesh, source = grid(), 2
    sizes = {"image": {0: (0, 2), 1: (4, 1)}, "pair": None, "array": "even", "number": {0: (3, 4)}}
    batches = [nested(i) for i in (4, 1, 0)]
    given = batches if dist.get_rank() == source else None
    sharded = ShardLoader(given, mesh, NESTED, shard_sizes=sizes, source=source)
    assert len(sharded) == 3
    for batch, whole in zip(sharded, batches, strict=True):
        assert batch["about"] == whole["about"] and type(batch["pair"]) is Pair and batch["pair"].second[1] is None
        check(batch["image"], whole["image"], {0: (0, 2), 1: (4, 1)})
        check(batch["pair"].first, whole["pair"].first)
        check(batch["pair"].second[0], whole["pair"].second[0].resolve_conj())
        check(batch["array"], torch.from_numpy(whole["array"]), {1: (2, 1)})
        check(batch["number"], whole["number"])


@dataclasses.dataclass
class Sample:
    """Registered as torch would have it, which makes it part of a batch's structure."""

    image: torch.Tensor
    names: list


register_dataclass(Sample)

# Values that no tensor represents, and what JSON alone would change.
SIDE_DATA = {
    "text": ["", "\udc80 \0 \n\u00e4", ["nested", ("a", 1)], ()],
    "bytes": bytes(range(256)),
    "large": (1 << 200, -(1 << 63), True, False, None),
    "floats": [math.inf, -math.inf, 5e-324, 0.1 + 0.2, 1e308],
    3: {-1: {}, None: 1, True: "true", 1.5: (), ("a", 2): [[]]},
    "L": ["L", ["d", "p"]],
    "ordered": collections.OrderedDict(b=1, a=2),
    "queue": collections.deque([1, (2,)], maxlen=5),
    "pair": Pair(1, Pair(b"", None)),
    "long": "x" * 10_000,
}


def same(a, b):
    """Equal, and of equal types all the way down."""
    if isinstance(a, dict):
        return type(a) is type(b) and same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, (list, tuple, collections.deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@on_ranks(4)
def test_side_data_arrives_unchanged_and_is_not_unpickled():
    class NoUnpickler(pickle.Unpickler):  # a class, as modules that torch imports late derive from it
        def __init__(self, *args, **kwargs):
            raise AssertionError("unpickled")

    def no_pickle(*args, **kwargs):
        raise AssertionError("unpickled")

    whole = numbers(4, 3)
    batches = [SIDE_DATA, Sample(whole, ["a", "b"]), [math.nan, -0.0], torch.sort(whole, dim=0)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (pickle, torch.distributed.distributed_c10d.pickle):
            for name, replaced in (("loads", no_pickle), ("load", no_pickle), ("Unpickler", NoUnpickler)):
                patch.setattr(module, name, replaced)
        patch.setattr(torch.distributed.distributed_c10d, "_unpickler", NoUnpickler)
        given = batches if domain().get_local_rank() == 0 else None
        received = list(ShardLoader(given, domain(), (Shard(0),), shard_sizes={0: (3, 1)}))
    assert same(received[0], SIDE_DATA)
    assert type(received[1]) is Sample and received[1].names == ["a", "b"]
    check(received[1].image, whole, {0: (3, 1)})
    assert math.isnan(received[2][0]) and math.copysign(1, received[2][1]) == -1
    check(received[3].values, whole.sort(dim=0).values)
    assert type(received[3]) is torch.return_types.sort


@on_ranks(4)
def test_a_type_that_one_rank_lacks_is_an_error_on_all():
    name = f"Made{dist.get_rank() % 2}"
    made = collections.namedtuple(name, "x y")
    made.__module__ = __name__
    globals()[name] = made
    sharded = ShardLoader([Pair(1, 2), made(1, 2)], domain())
    received = []
    with pytest.raises(TypeError, match=r"types that some ranks do not know: \{\d: 'test_data:Made0\(x, y\)'\}"):
        received.extend(sharded)
    batches = iter(sharded)  # the loader can go on
    assert next(batches) == Pair(1, 2)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 4


@on_ranks(4)
def test_anything_is_pickled_where_all_ranks_say_so():
    batches = [(Path("a"), Colour.RED, numbers(4, 3)), {frozenset([1]): None}]
    first, second = ShardLoader(batches, domain(), (Shard(0),), pickled=True)
    assert first[:2] == (Path("a"), Colour.RED) and second == {frozenset([1]): None}
    check(first[2], numbers(4, 3))
    with pytest.raises(ValueError, match=r"value of pickled: True on rank [02], False on rank [13];"):
        ShardLoader(batches, domain(), pickled=domain().get_local_rank() == 0)


@on_ranks(4)
@host_program()
def test_the_loader_waits_as_long_as_the_program():
    """Of the program's group, whatever torch's default is."""
    host = torch.device("cpu")
    world = dist.group.WORLD._get_backend(host).options._timeout
    own = ShardLoader([], domain())._group._get_backend(host).options._timeout
    assert own == world != dist.default_pg_timeout


@on_ranks(4)
def test_batches_are_cut_differently_by_functions_of_the_batch():
    mesh = shared_mesh(4)
    batches = [numbers(n, 3) for n in (9, 4, 17)]
    sharded = ShardLoader(
        iter(batches) if dist.get_rank() == 0 else None,  # any iterable; this one has no length
        mesh,
        lambda x: (Shard(0),) if len(x) > 4 else (Shard(1),),
        shard_sizes=lambda x: {0: (len(x) - 3, 0, 2, 1)} if len(x) > 4 else None,
    )
    with pytest.raises(TypeError, match="no length"):
        len(sharded)
    expected = [(6, 0, 2, 1), (1, 1, 1, 0), (14, 0, 2, 1)]
    for x, whole, sizes in zip(sharded, batches, expected, strict=True):
        check(x, whole, {0: sizes})


@host_program()
def two_domains():
    mesh = grid()
    data, target = numbers(12, 3, 5), torch.arange(12)
    given = None
    if domain().get_local_rank() == 1:
        dataset = TensorDataset(data, target)
        sampler = DistributedSampler(dataset, num_replicas=2, rank=mesh["dp"].get_local_rank(), seed=3)
        given = DataLoader(dataset, batch_size=2, sampler=sampler)
    source = int(domain().mesh[1])
    with domain():  # need not be named
        sharded = ShardLoader(given, placements=[(Shard(2),), (Replicate(),)], shard_sizes=(4, 1), source=source)
    seen = []
    for epoch in range(2):
        if given is not None:
            given.sampler.set_epoch(epoch)
        mine = []
        for x, y in sharded:
            check(x, data[y.to_local().cpu()], {0: (4, 1)})
            assert x.device_mesh == domain()
            mine += y.to_local().tolist()
        seen.append(mine)
    return seen


def test_each_domain_has_its_own_source():
    seen = run_distributed(two_domains, 4)
    assert seen[0] == seen[1] and seen[2] == seen[3]
    for epoch in range(2):
        assert sorted(seen[0][epoch] + seen[2][epoch]) == list(range(12))
    assert seen[0][0] != seen[0][1]


@on_ranks(4)
@host_program()
def test_domains_of_one_rank():
    mesh = shared_mesh((4, 1), AXES)["domain"]
    wholes = [numbers(3, 2, seed=dist.get_rank() + i) for i in range(3)]
    for x, whole in zip(ShardLoader(wholes, mesh, (Shard(0),)), wholes, strict=True):
        check(x, whole, {0: (3,)})
    check(read(wholes[0].numpy(), mesh, (Shard(1),)), wholes[0], {0: (2,)})


@on_ranks(4)
def test_a_rank_is_sent_its_shard_and_nothing_else():
    """To each rank its shard, in one message, and nothing of what the others get."""
    sent, send = [], dist.send
    dist.send = lambda t, to, **kwargs: (sent.append((to, t.numel())), send(t, to, **kwargs))
    try:
        whole = numbers(3, 10, 2)
        given = [whole] if dist.get_rank() == 1 else None
        for x in ShardLoader(given, shared_mesh(4), (Shard(1),), shard_sizes={0: (1, 2, 0, 7)}, source=1):
            check(x, whole)
    finally:
        dist.send = send
    assert sent == ([(0, 3 * 1 * 2 * 8), (3, 3 * 7 * 2 * 8)] if dist.get_rank() == 1 else [])


@on_ranks(4)
def test_large_shards_travel_in_blocks():
    """Several blocks, whose borders are no rows of the shard."""
    before, loader._BLOCK = loader._BLOCK, 100
    try:
        batches = [numbers(3, 2, 29, 5), numbers(200), numbers(2, 300)]
        sharded = ShardLoader(batches, grid(), lambda x: (Shard(0), Shard(x.ndim - 1) if x.ndim > 1 else Replicate()))
        for x, whole in zip(sharded, batches, strict=True):
            check(x, whole)
    finally:
        loader._BLOCK = before


# -- one rank reads: a batch ahead -------------------------------------------------------------------------------------


class Counted(Dataset):
    def __init__(self):
        self.read = 0

    def __len__(self):
        return 6

    def __getitem__(self, i):
        self.read += 1
        return torch.full((4,), float(i))


@on_ranks(4)
def test_the_next_batch_is_there_before_it_is_asked_for():
    dataset = Counted()
    sharded = ShardLoader(DataLoader(dataset, batch_size=None), domain(), (Shard(0),), shard_sizes={0: (3, 1)})
    for i, x in enumerate(sharded):
        assert dataset.read == (min(i + 2, 6) if sharded.is_source else 0)
        # Without any help from us; the ranks of the domain meet below, so that none is still to send.
        sharded._transfer._thread.join(20)
        assert not sharded._transfer._thread.is_alive()
        check(x, torch.full((4,), float(i)))


def under_way(sharded, wanted):
    """Whether the transfer is under way still; waits for what is wanted."""
    sharded._transfer._thread.join(0.5 if wanted else 20)
    return sharded._transfer._thread.is_alive()


@on_ranks(4)
def test_a_third_shard_waits_until_the_first_is_gone():
    """A receiver keeps two shards: the memory for a third one waits for the first to go, also in a graph."""
    rows = 2 * loader._SMALL // 4
    weight = torch.ones(1, requires_grad=True)
    sharded = ShardLoader([torch.full((rows, 2), i) for i in (1.0, 2.0, 3.0, 4.0)], domain(), (Shard(0),))
    receiver = not sharded.is_source
    batches = iter(sharded)
    first = next(batches)
    assert not under_way(sharded, False)
    second = next(batches)
    assert under_way(sharded, True) or not receiver
    graph = first[1:] * weight
    del first
    assert under_way(sharded, True) or not receiver
    del graph
    assert not under_way(sharded, False)
    third = next(batches)  # while the second is kept
    fourth = next(batches)
    for i, x in enumerate((second, third, fourth)):
        assert (x.to_local() == i + 2).all()


def reused(n):
    """Batches that are one tensor, written anew for each."""
    whole = torch.empty(6, 2)
    for i in range(n):
        yield whole.fill_(i)


@pytest.mark.on_cpu("an accelerator and its streams are imitated")
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@on_ranks(4)
def test_copies_to_an_accelerator_overlap_with_its_work(placement):
    """As to an accelerator: the copies are done when they are waited for, and read memory that is there until then."""
    sharded = ShardLoader(reused(4), domain(), (placement,))
    copying, computing = LateStream("copying"), LateStream("computing")
    copies = sharded._copies
    copies.needed, copies._stream, copies.memory = True, copying, lambda shape, dtype: torch.empty(shape, dtype=dtype)
    with on_stream(computing) as recorded:
        batches = iter(sharded)
        for i in range(4):
            x = next(batches)
            assert recorded.pop(x.to_local().data_ptr()) == "computing" and not recorded
            computing.synchronize()
            check(x, torch.full((6, 2), float(i)))
            sharded._transfer._thread.join(20)
            assert copying.queued == (i < 3), "nobody but who takes the next batch waits for it"
        assert next(batches, None) is None


class Fields(Dataset):
    """A sample is a batch of (1, 4, height, 1024) float32: 16 KiB a row."""

    def __init__(self, samples, height):
        self.samples, self.height = samples, height

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return torch.full((1, 4, self.height, 1024), float(i))


def resident(what="VmRSS"):
    """MiB of this process; VmHWM: its peak."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


@pytest.mark.on_cpu("shards of devices do not lie in the memory that is measured")
@pytest.mark.on_gloo("late communication copies what is sent and received")
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak of resident memory")
@pytest.mark.parametrize(("source_rows", "other_rows"), [(2304, 4352), (0, 4352)])
@on_ranks(4)
def test_the_source_holds_one_batch_and_the_others_two_shards(source_rows, other_rows):
    """The source its own two shards as well, as everybody; none if it is given no rows."""
    def epoch(samples):
        height = source_rows + other_rows
        dataset = Fields(samples, height) if domain().get_local_rank() == 0 else None
        given = None if dataset is None else DataLoader(dataset, batch_size=None)
        for i, x in enumerate(ShardLoader(given, domain(), (Shard(2),), shard_sizes={0: (source_rows, other_rows)})):
            assert (x.to_local()[..., ::50] == i).all()
        assert i == samples - 1

    epoch(1)
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    epoch(5)
    batch, own, other = ((source_rows + other_rows) / 64, source_rows / 64, other_rows / 64)
    rank = dist.get_rank()
    peak = resident("VmHWM") - before
    expected = 2 * other if rank % 2 else batch + 2 * own
    assert expected - 4 <= peak <= expected + 20, (rank, peak, expected)


def grid_source():
    return dist.get_rank() == 0


@on_ranks(4)
@host_program()
def test_the_source_draws_no_numbers_of_the_program():
    """What the source's loader draws, for its order and in its dataset, does not move its generator."""
    data = TensorDataset(torch.arange(6))
    given = DataLoader(data, batch_size=2, shuffle=True, collate_fn=lambda s: torch.rand(2)) if grid_source() else None
    sharded = ShardLoader(given, grid(), (Shard(0), Replicate()))
    before = torch.get_rng_state()
    epochs = [torch.cat([x.full_tensor() for x in sharded]) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(*epochs)  # but the loader's own goes on


# -- one rank reads: leaving, errors, going on -------------------------------------------------------------------------


@on_ranks(4)
def test_loops_may_be_left_nested_and_repeated():
    wholes = [numbers(5, 3, seed=i) for i in range(4)]
    first, second = (ShardLoader(wholes, domain(), (Shard(d),), source=int(domain().mesh[d])) for d in (0, 1))
    for stop in (0, 2, 3):
        for i, x in enumerate(first):
            check(x, wholes[i])
            if i == stop:
                break
    with contextlib.suppress(ZeroDivisionError):
        for _ in first:
            raise ZeroDivisionError
    for (i, x), y in zip(enumerate(first), second, strict=True):  # two at once
        check(x, wholes[i])
        check(y, wholes[i])
        if i % 2:
            for z, whole in zip(second_half := ShardLoader(wholes[2:], domain(), (Shard(1),)), wholes[2:]):
                check(z, whole)
            assert len(second_half) == 2
    kept = list(first)
    for x, whole in zip(kept, wholes, strict=True):
        check(x, whole)
    old = iter(first)
    next(old)
    check(next(iter(first)), wholes[0])
    with pytest.raises(RuntimeError, match="this iteration has ended"):
        next(old)
    with count_communication() as counted:
        for x in first:
            check(x, wholes[0])
            break
    assert not counted.messages  # all of it in its own thread, on its own group
    assert list(ShardLoader([], domain())) == []
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 4


class Broken(Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 2:
            raise self.error
        return numbers(4, 3, seed=i)


class Unsendable(Exception):
    def __init__(self, path, reason):
        super().__init__(f"{path}: {reason}")


class Hidden:
    def __init__(self):
        self.tensor = numbers(3)


class MetaTensor(torch.Tensor):
    """As that of MONAI."""


class Colour(enum.IntEnum):
    RED = 1


def fails(case):
    placements, sizes, given, options = (Shard(0),), None, [numbers(4, 3)], {}
    if case == "dataset":
        given = DataLoader(Broken(OSError("disk on fire")), batch_size=None)
    elif case == "unsendable":
        given = DataLoader(Broken(Unsendable("a.zarr", "is gone")), batch_size=None)
    elif case == "sizes":
        sizes = {0: (1, 2)}
    elif case == "dim":
        placements = {"x": (Shard(2),)}
        given = [{"x": numbers(4, 3)}]
    elif case == "no placements":
        placements, given = {"x": (Shard(0),)}, [{"x": numbers(4, 3), "y": numbers(2)}]
    elif case == "not down to tensors":
        placements = {"x": (Shard(0),)}
    elif case == "no sequence":
        placements = Shard(0)
    elif case == "partial":
        placements = (Partial(),)
    elif case == "file":
        given = DataLoader(Broken(FileNotFoundError(2, "No such file", "a.zarr")), batch_size=None)
    elif case == "derived":
        given = DataLoader(Broken(json.JSONDecodeError("Expecting value", "", 0)), batch_size=None)
    elif case == "awkward":
        given = DataLoader(Broken(UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid")), batch_size=None)
    elif case.startswith("hidden"):
        given = [{"x": Hidden()}]
        options["pickled"] = case != "hidden"
    elif case == "path":
        given = [("a", Path("a"))]
    elif case == "enum":
        given = [Colour.RED]
    elif case == "key":
        given = [{frozenset([1]): 1}]
    elif case == "factory":
        given = [collections.defaultdict(list, a=1)]
    elif case == "shards":
        given = [ShardTensor.from_local(numbers(2), domain())]
    elif case == "subclass":
        given = [numbers(4, 3).as_subclass(MetaTensor)]
    elif case == "function":
        sizes = lambda x: {}["no such key"]  # noqa: E731
    elif case == "no loader":
        given = None
    elif case == "iteration":
        given = 3
    sharded = ShardLoader(given, domain(), placements, shard_sizes=sizes, **options)
    seen = 0
    try:
        for _ in sharded:
            seen += 1
    except Exception as error:
        assert seen == (2 if isinstance(given, DataLoader) else 0)
        total = torch.ones(1)
        dist.all_reduce(total)  # all ranks are here
        assert total == 4
        raise error


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("dataset", OSError, "disk on fire"),
        ("file", FileNotFoundError, r"\[Errno 2\] No such file: 'a.zarr'"),
        ("unsendable", RuntimeError, "Unsendable: a.zarr: is gone"),
        ("derived", ValueError, "JSONDecodeError: Expecting value"),
        ("awkward", RuntimeError, "codec can't decode"),
        ("sizes", ValueError, r"batch: shard sizes \(1, 2\) of mesh dim 0 add up to 3, but tensor dim 0 has size 4"),
        ("dim", ValueError, r"batch\['x'\]: Shard\(2\) on mesh dim 0: the tensor has only 2 dims"),
        ("no placements", ValueError, r"batch\['y'\]: placements .* have no entry for \['y'\]"),
        ("not down to tensors", ValueError, "batch: placements .* do not fit a single tensor"),
        ("no sequence", TypeError, "batch: placements must be a sequence with one entry per mesh dim"),
        ("partial", ValueError, r"batch: data cannot be placed as \(Partial.*: only Shard and Replicate"),
        ("hidden", TypeError, r"batch\['x'\]: a test_data.Hidden cannot be sent .* pickled=True"),
        ("hidden, pickled", TypeError, "inside an object that is not a dict, list or .* it would be sent unsharded"),
        ("path", TypeError, r"batch\[1\]: a pathlib[.\w]*\.PosixPath cannot be sent"),
        ("enum", TypeError, "batch: a test_data.Colour cannot be sent"),
        ("key", TypeError, "a builtins.frozenset cannot be sent"),
        ("factory", TypeError, "a builtins.type cannot be sent"),
        ("shards", TypeError, "batch: a batch holds plain dense tensors, not a ShardTensor"),
        ("subclass", TypeError, r"not a MetaTensor \(torch.strided\). .* EnsureTyped\(keys, track_meta=False\)"),
        ("function", KeyError, "no such key"),
        ("no loader", TypeError, "source rank . must pass a loader of batches, not None"),
        ("iteration", TypeError, "source rank . must pass a loader of batches, not 3"),
    ],
)
def test_what_fails_on_the_source_is_raised_on_every_rank(case, kind, text):
    for error in run_expecting_errors(fails, 4, case):
        assert isinstance(error, kind) and re.search(text, str(error)), error


def in_other_groups():
    """torch names groups by how many the process is in; two loaders of the same ranks are two groups."""
    mesh = shared_mesh(3, device_type="cpu")
    if not hasattr(in_other_groups, "more"):
        in_other_groups.more = dist.new_group([0, 1])  # which the third rank is not in
    for _ in range(2):
        batches = [torch.arange(6.0)] if dist.get_rank() == 0 else None
        (batch,) = ShardLoader(batches, mesh, (Shard(0),))
        assert batch.to_local().tolist() == [2.0 * dist.get_rank(), 2.0 * dist.get_rank() + 1]


@pytest.mark.on_cpu("a loader's group is the host's")
def test_ranks_in_different_numbers_of_groups():
    run_distributed(in_other_groups, 3)


@on_ranks(4)
def test_a_source_outside_the_mesh_is_an_error():
    with pytest.raises(ValueError, match=r"source=9 is not in the mesh \[., .\]; name a global rank of the mesh"):
        ShardLoader([], domain(), source=9)
    with pytest.raises(RuntimeError, match="no mesh was given"):
        ShardLoader([])


@host_program()
def resume(workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def sharded():
        data = TensorDataset(torch.arange(20))
        options = {"batch_size": 3, "shuffle": True, "num_workers": workers}
        given = StatefulDataLoader(data, **options) if domain().get_local_rank() == 1 else None
        return ShardLoader(given, domain(), (Replicate(),), source=int(domain().mesh[1]))

    def values(batches):
        return [tuple(x.to_local().tolist()) for (x,) in batches]

    for seen in (0, 2, 7) if workers == 0 else (2,):
        running = sharded()
        batches = iter(running)
        done = values(itertools.islice(batches, seen))
        state = running.state_dict()
        assert bool(state) == running.is_source
        remaining = values(batches)
        assert sorted(itertools.chain(*done, *remaining)) == list(range(20)) and len(remaining) == 7 - seen
        torch.rand(7)  # another program, in another state
        fresh = sharded()
        fresh.load_state_dict(state)
        assert values(fresh) == remaining
        assert len(values(fresh)) == 7  # and the epoch after
        # Backwards, in the middle of an iteration.
        batches = iter(fresh)
        next(batches)
        fresh.load_state_dict(state)
        with pytest.raises(RuntimeError, match="load_state_dict was called"):
            next(batches)
        assert values(fresh) == remaining


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_next_unseen_batch(workers):
    pytest.importorskip("torchdata")
    run_distributed(resume, 4, workers)


@on_ranks(4)
def test_a_loader_without_state_says_so():
    sharded = ShardLoader(DataLoader([1, 2]), domain())
    if sharded.is_source:
        with pytest.raises(AttributeError, match="state_dict"):
            sharded.state_dict()
    else:
        assert sharded.state_dict() == {}


# -- each rank reads ---------------------------------------------------------------------------------------------------


class Recording:
    """An array that tells what was read from it."""

    def __init__(self, array, chunks=None):
        self._array, self.asked = array, []
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, chunks

    def __getitem__(self, key):
        assert isinstance(key, tuple) and len(key) == len(self.shape)
        piece = self._array[key]
        if piece.size:
            self.asked.append(key)
        return piece


INDICES = [
    (),
    3,
    -1,
    slice(2, 7),
    (slice(None), 1),
    (Ellipsis, slice(1, None, 3)),
    (np.int64(2), Ellipsis, -5),
    (slice(1, 6, 2), slice(0, 0)),
    (0, 0, 0),
    (slice(-3, None), slice(None), slice(1, 4)),
]


@on_ranks(4)
def test_a_rank_reads_its_own_slice_only():
    mesh = grid()
    values = np.arange(7 * 2 * 11, dtype=np.float32).reshape(7, 2, 11)
    for index in INDICES:
        whole = torch.from_numpy(np.array(values[index]))
        n = whole.shape
        layouts = [((Replicate(), Replicate()), None)]
        if whole.ndim:
            layouts += [((Shard(0), Replicate()), {0: (n[0], 0)}), ((Replicate(), Shard(-1)), None)]
        if whole.ndim > 1:
            layouts.append(((Shard(-1), Shard(0)), {0: (n[-1] // 3, n[-1] - n[-1] // 3)}))
        for placements, sizes in layouts:
            array = Recording(values)
            with count_communication() as counted:
                x = read(array, mesh, placements, index=index, shard_sizes=sizes)
            assert not counted.messages and not counted.collectives
            check(x, whole, sizes if sizes and len(sizes) == len(x.shard_sizes) else None)
            # Its own part in one piece, and nothing where there is none.
            assert len(array.asked) == (x.to_local().numel() > 0)
            if array.asked:
                assert np.array_equal(values[array.asked[0]], x.to_local().cpu().numpy())


@on_ranks(4)
@host_program()
def test_dtypes_byte_orders_and_own_memory():
    mesh = shared_mesh(4)
    values = np.arange(9 * 2).reshape(9, 2)
    for dtype in ("<f4", ">f4", ">i2", "?", "<u2", ">c8", "f2"):
        x = read(values.astype(dtype), mesh, (Shard(0),), shard_sizes={0: (2, 0, 3, 4)})
        check(x, torch.from_numpy(values.astype(np.dtype(dtype).newbyteorder("="))))
    x = read(values, mesh, (Shard(0),), dtype=torch.bfloat16)
    check(x, torch.from_numpy(values).bfloat16(), {0: (3, 3, 3, 0)})
    x.to_local().zero_()
    assert values.sum() == sum(range(18))  # its own memory
    fixed = np.ones(4)
    fixed.flags.writeable = False
    with mesh:
        assert read(fixed, placements=(Shard(0),)).device_mesh == mesh
        assert all(x.device_mesh == mesh for x in ShardLoader([torch.ones(4)], placements=(Shard(0),)))
    assert read(torch.arange(4), mesh, (Shard(0),)).to_local().item() == dist.get_rank()


@on_ranks(4)
def test_bad_indices_and_layouts_raise_before_anything_is_read():
    mesh, array = grid(), Recording(np.zeros((4, 6)))
    cases = [
        (TypeError, "only integers, slices and", {"index": ([0, 1],)}),
        (ValueError, "step must be positive", {"index": slice(None, None, -1)}),
        (IndexError, "index", {"index": (0, 0, 0)}),
        (IndexError, "index", {"index": (Ellipsis, Ellipsis)}),
        (IndexError, "out of range", {"index": 4}),
        (ValueError, "the tensor has only 1 dims", {"index": 0, "placements": (Shard(1), Replicate())}),
        (ValueError, "add up to 5", {"placements": (Shard(0), Replicate()), "shard_sizes": {0: (2, 3)}}),
        (ValueError, "only Shard and Replicate", {"placements": (Partial(), Replicate())}),
        (ValueError, "'chunks': dim 0 has no chunks", {"placements": (Shard(0), Replicate()), "shard_sizes": "chunks"}),
    ]
    for kind, text, kwargs in cases:
        with pytest.raises(kind, match=text):
            read(array, mesh, **kwargs)
    with pytest.raises(TypeError, match="torch has no dtype for NumPy's object; read numbers"):
        read(np.array([None]), mesh)
    with pytest.raises(ValueError, match="dim 0 has no chunks"):
        read(Recording(np.zeros((4, 6)), ((3, 1), (6,))), mesh, (Shard(0), Replicate()), shard_sizes="chunks")
    chunked = Recording(np.zeros((4, 6)), chunks=(2, 2))
    with pytest.raises(ValueError, match="only read in part"):
        read(chunked, mesh, (Shard(0), Replicate()), index=slice(1, 3), shard_sizes="chunks")
    assert not array.asked and not chunked.asked


@pytest.mark.parametrize(("n", "chunk", "sizes"), [(17, 4, (4, 4, 4, 5)), (6, 4, (0, 4, 0, 2)), (3, 1, (0, 1, 1, 1))])
@on_ranks(4)
def test_cuts_between_chunks(n, chunk, sizes):
    array = Recording(np.arange(3 * n).reshape(3, n), chunks=(2, chunk))
    whole = torch.arange(3 * n).view(3, n)
    check(read(array, shared_mesh(4), (Shard(1),), shard_sizes="chunks"), whole, {0: sizes})
    check(read(array, shared_mesh(4), (Shard(0),), index=1, shard_sizes="chunks"), whole[1], {0: sizes})
    dataset = SliceDataset(array, shared_mesh(4), (Shard(1),), shard_sizes="chunks")
    (x,) = dataset.batches(DataLoader(dataset, batch_size=3))
    check(x, whole, {0: sizes})


# -- files -------------------------------------------------------------------------------------------------------------


VALUES = np.random.default_rng(0).standard_normal((6, 2, 11, 4)).astype(np.float32)


def save(kind, path):
    if kind == "memmap":
        np.save(path, VALUES)
    elif kind == "zarr":
        import zarr

        array = zarr.open_array(path, mode="w", shape=VALUES.shape, chunks=(1, 2, 3, 4), dtype="float32")
        array[:] = VALUES
    else:
        import h5py

        with h5py.File(path, "w") as file:
            file.create_dataset("values", data=VALUES.astype(">f4"), chunks=(1, 2, 3, 4))


class Opened:
    """A function that opens a file, and that can be pickled."""

    def __init__(self, kind, path):
        self.kind, self.path = kind, path

    def __call__(self):
        if self.kind == "memmap":
            return np.load(self.path, mmap_mode="r")
        if self.kind == "zarr":
            import zarr

            return zarr.open_array(self.path, mode="r")
        import h5py

        return h5py.File(self.path, "r")["values"]


@host_program()
def from_file(kind, path):
    mesh, whole, opened = grid(), torch.from_numpy(VALUES), Opened(kind, path)
    array = opened()
    sizes = {1: (10, 1)}
    check(read(array, mesh, (Shard(0), Shard(2)), shard_sizes=sizes), whole, {0: (3, 3)} | sizes)
    check(read(array, mesh, (Shard(0), Shard(1)), index=4, shard_sizes=sizes), whole[4], {0: (1, 1)} | sizes)
    if kind != "memmap":
        check(read(array, domain(), (Shard(1),), index=2, shard_sizes="chunks"), whole[2], {0: (6, 5)})
    dataset = SliceDataset(opened, domain(), (Shard(2),), shard_sizes={0: (1, 10)})
    gc.collect()  # what earlier tests have left: a forked worker that collects memory pinned for a GPU is aborted
    for workers in (0, 2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=mesh["dp"].get_local_rank(), shuffle=False)
        batches = list(dataset.batches(DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=workers)))
        mine = whole[mesh["dp"].get_local_rank() :: 2]
        assert len(batches) == 2
        check(batches[0], mine[:2], {0: (1, 10)})
        check(batches[1], mine[2:], {0: (1, 10)})


@pytest.mark.parametrize("kind", ["memmap", "zarr", "h5py"])
def test_files_of_every_kind(kind, tmp_path):
    if kind != "memmap":
        pytest.importorskip(kind)
    path = str(tmp_path / "values.npy")
    save(kind, path)
    run_distributed(from_file, 4, kind, path)


NUMBERS = np.arange(7 * 8 * 3, dtype=np.int16).reshape(7, 8, 3)
PLAIN = {name: NUMBERS.astype(name) for name in (">f4", "<f8", ">i2", "<u2", "f2", "?")} | {"none": NUMBERS[:, :0]}


def numpy_arrays(folder):
    mapped = {}
    for name in PLAIN.keys() - {"none"}:
        np.save(folder / f"{name}.npy", PLAIN[name])
        mapped[f"mapped {name}"] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return PLAIN | mapped


def zarr_arrays(folder):
    import zarr

    for name, values in PLAIN.items():
        chunks = tuple(max(1, n // 2) for n in values.shape)
        array = zarr.open_array(
            str(folder / f"{name}.zarr"), mode="w", shape=values.shape, chunks=chunks, dtype=values.dtype
        )
        array[:] = values
    return {name: zarr.open_array(str(folder / f"{name}.zarr"), mode="r") for name in PLAIN}


def h5py_arrays(folder):
    import h5py

    file = h5py.File(folder / "values.h5", "w")
    for name, values in PLAIN.items():
        file[name] = values
    return dict(file)


def netcdf_file(folder):
    import netCDF4

    with netCDF4.Dataset(folder / "values.nc", "w") as file:
        for dim, n in zip("tyxn", (None, 8, 3, 0)):
            file.createDimension(dim, n)
        packed = file.createVariable("packed", "i2", ("t", "y", "x"), fill_value=-999)
        packed.scale_factor, packed.add_offset = 0.01, 270.0
        packed[:] = 270 + 0.01 * NUMBERS
        single = file.createVariable("single", "i2", ("t", "y", "x"))
        single.scale_factor = np.float32(0.5)
        single[:] = NUMBERS / 2
        unsigned = file.createVariable("unsigned", "i1", ("t", "y", "x"))
        unsigned._Unsigned = "true"
        unsigned[:] = NUMBERS.astype(np.uint8)
        file.createVariable("big", "f4", ("t", "y", "x"), endian="big")[:] = NUMBERS / 3
        file.createVariable("none", "i2", ("t", "n", "x")).scale_factor = 0.1
    return folder / "values.nc"


def netcdf_arrays(folder):
    import netCDF4

    return netCDF4.Dataset(netcdf_file(folder)).variables


def xarray_arrays(folder):
    pytest.importorskip("netCDF4")
    import xarray

    file = xarray.open_dataset(netcdf_file(folder), engine="netcdf4")
    return {name: file[name] for name in file}


def nibabel_arrays(folder):
    import nibabel

    for name, slope, offset in (("packed", 0.3, 1.0), ("plain", 1.0, 0.0)):
        image = nibabel.Nifti1Image(NUMBERS, np.eye(4), nibabel.Nifti1Header(endianness=">"))
        image.header.set_slope_inter(slope, offset)
        image.to_filename(folder / f"{name}.nii.gz")
    return {name: nibabel.load(folder / f"{name}.nii.gz").dataobj for name in ("packed", "plain")}


def tifffile_arrays(folder):
    import tifffile

    arrays = {}
    for order in "<>":
        file = folder / f"{order}.tif"
        tifffile.imwrite(file, NUMBERS.astype(np.uint16), byteorder=order, photometric="minisblack")
        arrays[order] = tifffile.memmap(file, mode="r")
    if find_spec("zarr"):
        import zarr

        arrays["store"] = zarr.open(tifffile.imread(file, aszarr=True), mode="r")
    return arrays


LIBRARIES = {
    "numpy": numpy_arrays,
    "zarr": zarr_arrays,
    "h5py": h5py_arrays,
    "netCDF4": netcdf_arrays,
    "xarray": xarray_arrays,
    "nibabel": nibabel_arrays,
    "tifffile": tifffile_arrays,
}


@host_program()
def unpacked(kind, folder):
    """The reader's own values and dtype, in complete and partial reads and in a dataset; rank 1 has an empty shard."""
    mesh = shared_mesh(3, device_type=device_of_meshes)
    folder = Path(folder, str(dist.get_rank()))
    folder.mkdir()
    layout = {"placements": (Shard(1),), "shard_sizes": {0: (5, 0, 3)}}
    arrays = LIBRARIES[kind](folder)
    for name, array in arrays.items():
        values = np.asarray(array[:])
        whole = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
        if kind in ("netCDF4", "xarray", "nibabel") and name == "packed":
            assert whole.dtype == torch.float64 and not torch.equal(whole, whole.trunc())
        if 0 in whole.shape:
            check(read(array, mesh, (Shard(0),)), whole)
            continue
        check(read(array, mesh, **layout), whole, {0: (5, 0, 3)})
        check(read(array, mesh, index=(slice(1, 6, 2), 4)), whole[1:6:2, 4])
        check(read(array, mesh, index=(0, 5, 2)), whole[0, 5, 2])
        check(read(array, mesh, **layout, dtype=torch.float32), whole.float())
        dataset = SliceDataset({"x": array}, mesh, **layout)
        (batch,) = dataset.batches(DataLoader(dataset, batch_size=7))
        check(batch["x"], whole, {0: (5, 0, 3)})


@pytest.mark.parametrize("kind", LIBRARIES)
def test_values_and_dtype_are_those_that_the_reader_returns(kind, tmp_path):
    pytest.importorskip(kind)
    run_distributed(unpacked, 3, kind, str(tmp_path))


@on_ranks(3)
@host_program()
def test_masked_points_are_filled_or_an_error():
    """Only rank 2 of three reads a masked point; rank 1 has an empty shard."""
    mesh, rank = shared_mesh(3, device_type=device_of_meshes), dist.get_rank()
    layout = {"placements": (Shard(1),), "shard_sizes": {0: (5, 0, 3)}}
    values = np.ma.array(NUMBERS, mask=np.zeros(NUMBERS.shape, bool))
    check(read(values, mesh, **layout), torch.from_numpy(NUMBERS))  # a mask of no points is none
    values.mask[3, 6, 1] = True
    message = "1 of 63 points of .* are masked, and have no value; pass fill="
    with pytest.raises(ValueError, match=message) if rank == 2 else contextlib.nullcontext():
        read(values, mesh, **layout)
    with pytest.raises(ValueError, match=r"nan is no value of torch.int16") if rank == 2 else contextlib.nullcontext():
        read(values, mesh, **layout, fill=math.nan)
    with pytest.raises(ValueError, match=message.replace("63", "1")):
        read(values, mesh, index=(3, 6, 1))
    for dtype, fill in ((None, -7), (torch.float32, math.nan), (torch.bfloat16, 0.5), (torch.uint16, 9)):
        whole = torch.from_numpy(NUMBERS).to(dtype or torch.int16)
        whole[3, 6, 1] = fill
        found = [read(values, mesh, **layout, dtype=dtype, fill=fill)]
        dataset = SliceDataset({"x": values}, mesh, **layout, dtype=dtype, fill=fill)
        found += [batch["x"] for batch in dataset.batches(DataLoader(dataset, batch_size=7))]
        found += [read(values, mesh, index=(3, 6, 1), dtype=dtype, fill=fill)]
        for x, part_of_it in zip(found, (whole, whole, whole[3, 6, 1]), strict=True):
            assert x.dtype == whole.dtype and torch.equal(
                x.to_local().double().nan_to_num(-1).cpu(), part(part_of_it, x).double().nan_to_num(-1)
            )
    dataset = SliceDataset(values, mesh, **layout)
    kind, text = (ValueError, "are masked") if rank == 2 else (RuntimeError, r"ranks \[2\] could not read a batch")
    with pytest.raises(kind, match=text):
        list(dataset.batches(DataLoader(dataset, batch_size=7)))


@host_program()
def masked_in_netcdf(path):
    """A packed integer that is missing, and one that nobody has written; a single one is masked as float64."""
    import netCDF4

    mesh = shared_mesh(3, device_type=device_of_meshes)
    packed = netCDF4.Dataset(path)["packed"]
    whole = torch.tensor([270.0, 270.01, math.nan, 270.03, math.nan], dtype=torch.float64)
    x = read(packed, mesh, (Shard(0),), shard_sizes={0: (2, 0, 3)}, fill=math.nan)
    assert x.dtype == torch.float64
    torch.testing.assert_close(x.to_local().cpu(), part(whole, x), rtol=1e-15, atol=0, equal_nan=True)
    packed.set_auto_scale(False)  # integers, as the program asks for
    check(read(packed, mesh, fill=-1), torch.tensor([0, 1, -1, 3, -1], dtype=torch.int16))
    check(read(packed, mesh, index=2, fill=-1), torch.tensor(-1, dtype=torch.int16))


def test_missing_values_of_netcdf(tmp_path):
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "values.nc", "w") as file:
        file.createDimension("x", 5)
        packed = file.createVariable("packed", "i2", ("x",), fill_value=-999)
        packed.scale_factor, packed.add_offset = 0.01, 270.0
        packed[:4] = np.ma.array([270.0, 270.01, 0.0, 270.03], mask=[False, False, True, False])
    run_distributed(masked_in_netcdf, 3, str(tmp_path / "values.nc"))


class Unequal:
    """An array whose pieces are of another dtype than its empty slice."""

    shape = (4, 6)

    def __getitem__(self, key):
        piece = np.arange(24).reshape(4, 6)[key]
        return piece / 2 if piece.size else piece


@on_ranks(2)
def test_dtypes_that_torch_does_not_have_and_readers_that_change_theirs():
    mesh = shared_mesh(2)
    with pytest.raises(TypeError, match=r"float64, but an empty slice of the array is torch.int64; pass dtype="):
        read(Unequal(), mesh, (Shard(0),))
    check(read(Unequal(), mesh, (Shard(0),), dtype=torch.float32), torch.arange(24).view(4, 6).float() / 2)
    # On all ranks, also on the one that has nothing to read.
    for values in (np.zeros(3, "M8[h]"), np.zeros(3, "m8[s]"), np.array(["a"] * 3), np.zeros(3, "i4,f4")):
        for make in (read, SliceDataset):
            with pytest.raises(TypeError, match="torch has no dtype for NumPy's"):
                make(np.stack([values] * 3), mesh, (Shard(1),), shard_sizes={0: (3, 0)})


def dates(path):
    import xarray

    mesh = shared_mesh(2)
    with pytest.raises(TypeError, match=r"NumPy's datetime64\[ns\]; read numbers"):
        read(xarray.open_dataset(path, engine="netcdf4")["time"], mesh, (Shard(0),), shard_sizes={0: (0, 3)})
    hours = xarray.open_dataset(path, engine="netcdf4", decode_times=False)["time"]
    check(read(hours, mesh, (Shard(0),), shard_sizes={0: (0, 3)}), torch.arange(3.0, dtype=torch.float64))


def test_dates_of_xarray(tmp_path):
    pytest.importorskip("xarray")
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "values.nc", "w") as file:
        file.createDimension("time", 3)
        time = file.createVariable("time", "f8", ("time",))
        time.units, time[:] = "hours since 2000-01-01", range(3)
    run_distributed(dates, 2, str(tmp_path / "values.nc"))


@host_program()
def to_file(kind, path):
    """Sharded otherwise than the file's chunks, copied on an axis, contributions, an empty shard; step after step."""
    mesh = grid()
    values = torch.from_numpy(VALUES).to(mesh.device_type)
    if kind == "zarr":
        import zarr

        array = zarr.open_array(path, mode="r+")
    else:
        array = np.load(path, mmap_mode="r+")
    layouts = [
        ((Shard(1), Shard(2)), {0: (4, 7), 1: (1, 3)}),
        ((Replicate(), Shard(1)), {1: (11, 0)}),
        ((Shard(1), Replicate()), {0: (5, 6)}),
        ((Replicate(), Replicate()), None),
    ]
    for step, (placements, sizes) in enumerate(layouts):
        x = shard(-values[step], mesh, placements, sizes)
        write(array, x, index=step)
        assert np.array_equal(array[step], -VALUES[step])  # complete on return, whoever reads
    halves = ShardTensor.from_local(values[0] / 2, mesh["domain"], [Partial()])
    write(array, halves, index=0)
    assert np.array_equal(array[0], VALUES[0])
    x = shard(values[:, :, 0], mesh, [Replicate(), Shard(1)])
    with pytest.raises(ValueError, match=r"array\[.*\] has shape \(6, 2, 4\), but x has shape \(6, 2, 3\)"):
        write(array, x[:, :, :3], index=(..., 0, slice(None)))
    if kind == "zarr":
        with pytest.raises(ValueError, match=r"dim 1 is sharded, but .* has parts of its chunks; write the"):
            write(array, shard(values[:, 0, 2:8], mesh, [Shard(1), Replicate()]), index=(slice(None), 0, slice(2, 8)))


class Full:
    """An array that one rank cannot write to."""

    def __init__(self):
        self.shape = (4,)

    def __getitem__(self, key):
        return np.zeros(4, np.float32)[key]

    def __setitem__(self, key, value):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")


class Slow(Full):
    """An array that is written to when ``go`` is set, and fails on one rank at the end."""

    def __init__(self):
        self.shape, self.go, self.order = (4, 6), threading.Event(), []
        self.stored = np.zeros(self.shape)

    def __getitem__(self, key):
        return self.stored[key]

    def __setitem__(self, key, value):
        assert self.go.wait(60)
        if dist.get_rank() == 1 and key[0] == 3:
            raise OSError(28, "No space left on device")
        self.order.append(key[0])
        self.stored[key] = value


@pytest.mark.on_device
@on_ranks(2)
def test_writes_while_the_next_step_is_computed():
    mesh, rank, array = shared_mesh(2), dist.get_rank(), Slow()
    x = shard(torch.arange(6.0), mesh, [Shard(0)], {0: (5, 1)})
    own = slice(0, 5) if rank == 0 else slice(5, 6)
    pending = []
    for step in range(4):
        pending.append(write(array, x, index=step, wait=False))
        x.mul_(10.0)  # in place: the values of the call are written
    assert not array.order
    array.go.set()
    for writing in pending[:3]:
        writing.wait()
    for step in range(3):
        assert np.array_equal(array.stored[step, own], (np.arange(6.0) * 10.0**step)[own])
    error, text = (OSError, "No space left") if rank else (RuntimeError, r"ranks \[1\] could not write; they raise")
    with pytest.raises(error, match=text):
        pending[3].wait()
    assert array.order[:3] == [0, 1, 2]


@on_ranks(2)
def test_a_write_does_not_wait_for_the_device(emulated):
    """Later writes, whose places are compared with the next number, cost the host nothing."""
    from device.emulated import counted

    mesh, array = shared_mesh(2), Slow()
    array.go.set()
    x = shard(torch.arange(6.0), mesh, [Shard(0)])
    for _ in range(16):
        write(array, x, index=0, wait=False).wait()
    with counted() as seen:
        writing = write(array, x, index=1, wait=False)
    assert not seen.total("sync") and not any("pageable" in name for _, name in seen.events), seen.of("sync")
    writing.wait()


class Packed:
    """An array that packs what is written to it into integers, as netCDF4 does."""

    def __init__(self, shape):
        self.stored = np.zeros(shape, np.int16)
        self.shape, self.dtype = shape, self.stored.dtype

    def __getitem__(self, key):
        return self.stored[key] * 0.01 + 270.0

    def __setitem__(self, key, values):
        self.stored[key] = np.round((values - 270.0) / 0.01)


@on_ranks(2)
def test_values_are_written_as_they_would_be_read_or_refused():
    mesh, rank = shared_mesh(2), dist.get_rank()
    array, values = Packed((8,)), torch.tensor([270.0, 270.01, 270.5, 271.99, 1.0, 2.0, 269.99, 280.0]).double()
    write(array, shard(values, mesh, [Shard(0)], {0: (5, 3)}))
    own = slice(0, 5) if rank == 0 else slice(5, 8)
    assert np.array_equal(array.stored[own], np.round((values.cpu().numpy() - 270) * 100).astype(np.int16)[own])
    # Integers hold whole numbers, from whatever dtype; all else, on rank 1, is an error on both.
    for dtype, bad in ((np.int16, 2.5), (np.int16, 4e4), (np.uint8, -1.0), (np.int32, math.nan), (bool, 2.0)):
        array, values = np.zeros(8, dtype), torch.ones(8, dtype=torch.float64)
        write(array, shard(values, mesh, [Shard(0)]))
        assert array.sum() == 4
        values[7] = bad
        text = f"{bad} is no value of torch" if rank else r"ranks \[1\] could not write"
        with pytest.raises(ValueError if rank else RuntimeError, match=text):
            write(array, shard(values, mesh, [Shard(0)]))
        assert array.sum() == 4
    write(array := np.zeros(8, np.float16), shard(values / 3, mesh, [Shard(0)]))  # rounded


def to_a_full_disk():
    mesh = shared_mesh(2)
    write(Full(), shard(torch.ones(4), mesh, [Shard(0)]))


def test_a_rank_that_cannot_write_is_an_error_on_all():
    first, second = run_expecting_errors(to_a_full_disk, 2)
    assert "ranks [1] could not write; they raise their own errors" in str(first)
    assert isinstance(second, OSError) and "No space left" in str(second)


@pytest.mark.parametrize("kind", ["memmap", "zarr"])
def test_each_rank_writes_its_shard(kind, tmp_path):
    if kind != "memmap":
        pytest.importorskip(kind)
    path = str(tmp_path / "values.npy")
    save(kind, path)
    run_distributed(to_file, 4, kind, path)


@on_ranks(4)
@host_program()
def test_several_arrays_of_one_sample():
    x, y = Recording(VALUES), Recording(np.arange(6))
    layout = {"fields": ((Shard(2),), (Shard(3),)), "label": (Replicate(),)}
    dataset = SliceDataset({"fields": (x, x), "label": y}, domain(), layout)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)  # equal seeds: equal orders
    seen = []
    for batch in dataset.batches(loader):
        samples = batch["label"].to_local().cpu()
        whole = torch.from_numpy(VALUES)[samples]
        assert type(batch["fields"]) is tuple
        check(batch["fields"][0], whole, {0: (6, 5)})
        check(batch["fields"][1], whole, {0: (2, 2)})
        seen += samples.tolist()
    assert sorted(seen) == list(range(6)) and len(dataset) == 6
    rows, columns = [(slice(0, 6, 1), slice(0, 2, 1)), (slice(6, 11, 1), slice(2, 4, 1))][domain().get_local_rank()]
    for i in range(6):
        asked = [key[1:] for key in x.asked if key[0] == i]
        both, every = slice(0, 2, 1), (slice(0, 11, 1), slice(0, 4, 1))
        assert asked == [(both, rows, every[1]), (both, every[0], columns)]


class Unreadable(Recording):
    def __getitem__(self, key):
        if super().__getitem__(key).size:
            raise OSError("disk on fire")
        return self._array[key]


def bad_batches(case):
    mesh, rank = grid(), dist.get_rank()
    array = np.zeros((8, 4))
    if case == "sharded samples":
        SliceDataset(array, mesh, (Shard(0), Replicate()))
    if case == "unequal":
        SliceDataset([array, array[1:]], mesh, (Shard(1), Replicate()))
    if case == "unreadable" and rank == 2:
        array = Unreadable(array)
    dataset = SliceDataset(array, mesh, (Shard(1), Replicate()))
    options = {"batch_size": 2}
    if case == "order":
        options["sampler"] = [0, 1, 2, 3] if rank != 3 else [0, 1, 3, 2]
    elif case == "length":
        options["sampler"] = [0, 1, 2, 3] if rank != 1 else [0, 1]
    elif case == "no batches":
        options["batch_size"] = None
    elif case == "collated":
        options["collate_fn"] = lambda samples: [torch.tensor([i for i, _ in samples]), [x for _, x in samples]]
    try:
        for _ in dataset.batches(DataLoader(dataset, **options)):
            pass
    finally:
        total = torch.ones(1)
        dist.all_reduce(total)


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("sharded samples", ValueError, "batch: dim 0 counts the samples and cannot be sharded"),
        ("unequal", ValueError, r"arrays of \[7, 8\] samples"),
        ("order", ValueError, r"ranks \[3\] have not read the same samples as rank 0: .*need samplers of the same"),
        ("length", ValueError, r"ranks \[1\] have not read the same samples as rank 0"),
        ("no batches", TypeError, "give the DataLoader a batch_size"),
        ("collated", TypeError, "the loader has made .*; leave collate_fn out"),
        ("unreadable", (OSError, RuntimeError), r"disk on fire|ranks \[2\] could not read a batch"),
    ],
)
def test_ranks_that_read_differently_raise_alike(case, kind, text):
    errors = run_expecting_errors(bad_batches, 4, case)
    for rank, error in enumerate(errors):
        assert isinstance(error, kind) and re.search(text, str(error)), error
        assert case != "unreadable" or isinstance(error, OSError) == (rank == 2)


# -- the example -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_checks_itself():
    pytest.importorskip("zarr")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    found = subprocess.run(
        [*command, str(ROOT / "examples" / "data_loading.py"), "--check"], capture_output=True, text=True, timeout=500
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("PASS") == 2 + (4 if os.access("/proc/self/clear_refs", os.W_OK) else 0)

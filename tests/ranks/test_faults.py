"""Programs in which one rank does something else: how they end, kind by kind. ``python test_faults.py KIND`` is a rank.

An end is *told* (every rank that is alive raises an error that names a rank and what was done or waited for), *right*,
*silent* (a rank ends as if nothing was wrong), an *abort* (the transport ends a process), *nameless* (an error of the
transport's) or a *hang*.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import shardtensor
from shardtensor import ShardTensor, attention_method, scatter_tensor, set_transport
from shardtensor.data import ShardLoader
from shardtensor.debug import check
from shardtensor.neighbors import knn
from shardtensor.parallel import DomainParallel, synchronize

TIMEOUT = 6.0
SIZES = {2: (9, 7), 3: (9, 2, 5), 4: (9, 7)}


class Here:
    """What a kind of fault is given: this rank, whether it is the odd one, the mesh."""

    def __init__(self) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.odd = self.rank == 1
        self.mesh = init_device_mesh("cpu", (world,) if world < 4 else (2, 2))
        self.sizes = SIZES[world]

    def image(self, channels=4, dtype=torch.float32, dim=2, sizes=None, odd=False):
        """An image, of whose sizes nothing is sent: of the same program on every rank, but for ``odd`` arguments."""
        sizes = sizes or self.sizes
        m = self.mesh.ndim - 1
        shape = [1, channels, 16, 16]
        shape[dim] = sizes[self.mesh.get_local_rank(m)]
        placements = [Replicate()] * m + [Shard(dim)]
        return ShardTensor.from_local(torch.ones(shape, dtype=dtype), self.mesh, placements, shard_sizes={m: sizes})


def conv(x, k=3, **options):
    return F.conv2d(x, torch.ones(4, x.shape[1], k, k, dtype=x.dtype), padding=k // 2, **options)


def pools(x, names):
    for name in names:
        x = getattr(F, name)(x, 3, 1, 1)
    return x


def attend(x, method):
    with attention_method(method):
        q = x.flatten(2).transpose(1, 2).unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)


def over(x, transport):
    with set_transport(transport):
        return conv(x)


# What ranks do with an image: the odd rank by the second argument. Run at once ("new"), or after all ranks have done
# both ("known").
OTHERWISE = {
    "kernel": lambda x, h, odd: conv(x, 5 if odd else 3),
    "kernel of a smaller one": lambda x, h, odd: conv(x, 3 if odd else 5),
    "dilation": lambda x, h, odd: F.conv2d(x, torch.ones(4, 4, 3, 3), padding=2 if odd else 1, dilation=1 + odd),
    "same halo": lambda x, h, odd: F.max_pool2d(x, 3, 1, 1) if odd else F.avg_pool2d(x, 3, 1, 1),
    "channels": lambda x, h, odd: conv(h.image(8 if odd else 4)),
    "dtype": lambda x, h, odd: conv(h.image(dtype=torch.float64 if odd else torch.float32)),
    "placement": lambda x, h, odd: conv(h.image(dim=3 if odd else 2)),
    "given sizes": lambda x, h, odd: conv(h.image(sizes=h.sizes[::-1] if odd else h.sizes)),
    "redistribute to sizes": lambda x, h, odd: x.redistribute(
        placements=(Shard(2),), shard_sizes={0: (15 - 10 * odd, *[0] * (len(h.sizes) - 2), 1 + 10 * odd)}
    ),
    "redistribute to dims": lambda x, h, odd: x.redistribute(placements=(Shard(1 if odd else 3),)),
    "redistribute to copies": lambda x, h, odd: x.redistribute(placements=(Replicate() if odd else Shard(3),)),
    "attention": lambda x, h, odd: attend(x, "fetch" if odd else "ring"),
    "sum or amax": lambda x, h, odd: (x.double().amax((1, 2)) if odd else x.sum((1, 2))).redistribute(
        placements=(Replicate(),)
    ),
    "order of two": lambda x, h, odd: conv(conv(x, 5 if odd else 3), 3 if odd else 5),
    "order of two alike": lambda x, h, odd: pools(x, ["max_pool2d", "avg_pool2d"][:: -1 if odd else 1]),
    "left out": lambda x, h, odd: x if odd else conv(x),
    "sum for convolution": lambda x, h, odd: x.sum().full_tensor() if odd else conv(x),
    "roll": lambda x, h, odd: x.roll(5 if odd else 1, 2),
    "neighbours": lambda x, h, odd: knn(x[0, :3, :, 0].T, x[0, :3, :, 1].T, 5 if odd else 3),
    "cumsum or flip": lambda x, h, odd: x.cumsum(2) if odd else x.flip(2),
    "eps": lambda x, h, odd: F.group_norm(x, 2, eps=1.0 if odd else 1e-5),
    "groups": lambda x, h, odd: F.group_norm(x, 4 if odd else 2),
    "transport": lambda x, h, odd: over(x, "p2p" if odd else "all_to_all"),
    "number read": lambda x, h, odd: x.sum().item() if odd else conv(x),
    "full tensor": lambda x, h, odd: x.full_tensor() if odd else x,
    "from_local": lambda x, h, odd: conv(x) if odd else ShardTensor.from_local(torch.ones(2), h.mesh),
    "scatter": lambda x, h, odd: conv(x) if odd else scatter_tensor(torch.ones(4), h.mesh, [Replicate()] * h.mesh.ndim),
    "scatter to sizes": lambda x, h, odd: scatter_tensor(
        torch.ones(16) if h.rank == 0 else None,
        h.mesh,
        (Shard(0),),
        shard_sizes={0: h.sizes[::-1] if odd else h.sizes},
        global_shape=(16,),
        dtype=torch.float32,
    ),
    "backward": lambda x, h, odd: conv(x.requires_grad_()).sum() if odd else conv(x.requires_grad_()).sum().backward(),
    "compiled": lambda x, h, odd: torch.compile(conv, backend="aot_eager", dynamic=False)(x, 5 if odd else 3),
}


# What has a program of its own.
def weights_differ(h):
    torch.manual_seed(h.rank)
    layer = nn.Conv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        return layer(h.image()).to_local()


def weights_differ_read(h):
    torch.manual_seed(h.rank)
    with torch.no_grad():
        nn.Conv2d(4, 4, 3, padding=1)(h.image()).sum().item()


def domain_parallel(h, odd_input, odd_weight):
    torch.manual_seed(h.rank if odd_weight else 0)
    model = nn.Conv2d(4, 4, 3, padding=1)
    parallelize_module(model, h.mesh, DomainParallel(inputs=Shard(2), outputs=Replicate()))
    torch.manual_seed(h.rank if odd_input else 0)
    with torch.no_grad():
        model(torch.randn(1, 4, 16, 16))


def replicated_values(h):
    x = ShardTensor.from_local(torch.full((3,), float(h.rank)), h.mesh)
    (h.image()[..., :3] + x).sum().item()


def dropout_seed(h):
    torch.manual_seed(h.rank)
    F.dropout(h.image(), 0.5).sum().item()


def dropout_of_copies(h):
    torch.manual_seed(h.rank)
    x = ShardTensor.from_local(torch.ones(8), h.mesh, shard_sizes={})
    F.dropout(x, 0.5)
    h.image().sum().item()


def caught(h):
    x = h.image()
    conv(x).sum().item()
    with contextlib.suppress(ValueError):
        if h.odd:
            raise ValueError("of this rank alone")
        conv(x).sum().item()
    conv(x, 5).sum().item()


def loader(h, how):
    class Source(torch.utils.data.IterableDataset):
        def __iter__(self):
            for i in range(4):
                if i == 2:
                    print(f"fails at {time.time()}", flush=True)
                    if how == "dies":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if how == "freezes":
                        time.sleep(60)
                    if how == "raises":
                        raise ValueError("a file that cannot be read")
                yield torch.ones(1, 4, 16, 16)

    batches = torch.utils.data.DataLoader(Source(), batch_size=None) if h.rank == 1 else None
    for x in ShardLoader(batches, h.mesh, (Shard(2),), source=1):
        conv(x).sum().item()


def loader_not_called(h):
    if not h.odd:
        batches = [torch.ones(1, 4, 16, 16)] * 2 if h.rank == 0 else None
        for x in ShardLoader(batches, h.mesh, (Shard(2),), source=0):
            conv(x).sum().item()
    conv(h.image()).sum().item()


def folder():
    return Path(tempfile.gettempdir()) / f"shardtensor faults {os.environ['MASTER_PORT']}"


def killed_writer(h):
    from shardtensor.checkpoint import CheckpointWriter

    class Killed(CheckpointWriter):
        def write_data(self, *args, **kwargs):
            if h.odd:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write_data(*args, **kwargs)

    dcp.save({"x": h.image()}, storage_writer=Killed(folder() / "step_1"))


def flipped(h, plain):
    from shardtensor.checkpoint import CheckpointReader, CheckpointWriter

    place = folder() / "step_1"
    dcp.save({"x": h.image()}, storage_writer=dcp.FileSystemWriter(place) if plain else CheckpointWriter(place))
    dist.barrier()
    if h.odd:
        file = max((f for f in place.iterdir() if f.suffix == ".distcp"), key=lambda f: f.stat().st_size)
        data = bytearray(file.read_bytes())
        data[data.rindex(b"\x00\x00\x80\x3f")] ^= 1
        file.write_bytes(data)
    dist.barrier()
    state = {"x": h.image() * 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(place) if plain else CheckpointReader(place))
    assert plain or state["x"].sum().item() == 4 * 16 * 16


def sync_int16(h):
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.full((3,), h.rank, dtype=torch.int16))
    synchronize(model, h.mesh)
    check(model, mesh=h.mesh)
    assert model.table.tolist() == [0, 0, 0]


def two_threads(h):
    import threading

    x, errors = h.image(), []

    def work(k):
        try:
            for _ in range(20):
                conv(x, k)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(3 if (i == 0) != h.odd else 5,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def fractional(h):
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.rand(1, 4, 8, 8, 8)
        torch.manual_seed(0)
        whole = F.fractional_max_pool3d(x, 2, output_size=3)
        torch.manual_seed(0)
        channels = ShardTensor.from_local(x, h.mesh).redistribute(placements=(Shard(1),))
        assert torch.equal(F.fractional_max_pool3d(channels, 2, output_size=3).full_tensor(), whole)


def other_method(h):
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            return self.decode(x)

        def decode(self, x):
            return self.decoder(x)

    vae = Vae()
    parallelize_module(vae, h.mesh, DomainParallel(inputs=Shard(2), outputs=Replicate()))
    vae.decode(torch.ones(1, 4, 16, 16))


def last_operator(h):
    """A message that is too short for the odd rank, which does not notice and ends."""
    for k in (3, 5, 5 if h.odd else 3):
        conv(h.image(), k)


def destroyed(h):
    try:
        last_operator(h)
    finally:
        dist.destroy_process_group()


def own_collective(h):
    conv(h.image())
    dist.all_reduce(torch.ones(8 if h.odd else 4))


PROGRAMS = {
    "weights, never read": weights_differ,
    "weights, read": weights_differ_read,
    "DomainParallel, noise": lambda h: domain_parallel(h, True, False),
    "DomainParallel, weights": lambda h: domain_parallel(h, False, True),
    "DomainParallel, another method": other_method,
    "replicated values": replicated_values,
    "dropout of shards": dropout_seed,
    "dropout of copies": dropout_of_copies,
    "exception caught": caught,
    "loader's source dies": lambda h: loader(h, "dies"),
    "loader's source freezes": lambda h: loader(h, "freezes"),
    "loader's source raises": lambda h: loader(h, "raises"),
    "loader of one rank": loader_not_called,
    "writer killed": killed_writer,
    "byte flipped": lambda h: flipped(h, False),
    "byte flipped, plain": lambda h: flipped(h, True),
    "int16 buffer": sync_int16,
    "two threads": two_threads,
    "last operator": last_operator,
    "groups destroyed": destroyed,
    "own collective": own_collective,
    "fractional pool in autocast": fractional,
    "ends early": lambda h: sys.exit(0) if h.odd else ShardTensor.from_local(torch.ones(2), h.mesh),
    "freezes": lambda h: time.sleep(60) if h.odd else ShardTensor.from_local(torch.ones(2), h.mesh),
}

# How the kinds end that are not told on all ranks.
ENDS = dict.fromkeys(["dropout of shards", "int16 buffer", "fractional pool in autocast"], "right")
ENDS["DomainParallel, another method"] = "warned"
ENDS["byte flipped, plain"] = "silent"  # torch's own files have no digests
# What sends messages of other sizes.
OTHER_SIZES = "kernel", "kernel of a smaller one", "dilation", "channels", "dtype", "redistribute to copies"
OTHER_SIZES += "sum or amax", "order of two", "roll", "groups", "compiled"
# Collectives of the program's own, for which no ShardTensor waits.
ENDS["own collective"] = "abort"
WORLDS = {"new": 2, "known": 2, "3 ranks": 3, "2 x 2 ranks": 4}
KINDS = [f"{name}: {when}" for name in OTHERWISE for when in ("new", "known")]
KINDS += [f"{name}: new, {n} ranks" for name in ("kernel", "left out", "attention") for n in ("3", "2 x 2")]
KINDS += [f"{name}: known, {n} ranks" for name in ("kernel", "groups") for n in ("3", "2 x 2")]
KINDS += [*PROGRAMS, "weights, never read, 2 x 2 ranks"]


def rank_of(kind):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    here = Here()
    name, _, when = kind.partition(": ")
    if not when:
        PROGRAMS[name.removesuffix(", 2 x 2 ranks")](here)
    else:
        do, x = OTHERWISE[name], here.image()
        x.sum().item()
        for odd in (False, True) if when.startswith("known") else ():
            do(x.detach(), here, odd)
        do(x.detach(), here, here.odd)
        conv(here.image()).sum().item()
    print("ended", flush=True)


# -- how they end ------------------------------------------------------------------------------------------------------

NAMED = re.compile(
    r"RanksDiffer: |have not done the same|LostRankError: rank \d+: .* (rank \d+ (has|raised|failed)|ranks .* have) |"
    r"do not agree|differ between|two threads communicate|source rank \d+|DamagedCheckpoint|rank \d+ has said nothing"
)


def serve():
    """Run the kinds that are asked for on standard input, in forked processes, which import nothing anew."""
    for line in sys.stdin:
        kind, port = json.loads(line)
        world = WORLDS.get(re.split("[:,] ", kind)[-1], 2)
        outputs = [tempfile.TemporaryFile() for _ in range(world)]  # noqa: SIM115  # open in the forked processes
        ranks = []
        for rank, output in enumerate(outputs):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                return rank_of(kind)  # and end as any program does
        codes, end = {}, time.monotonic() + 20 * TIMEOUT
        while len(codes) < world - ("freezes" in kind) and time.monotonic() < end:
            time.sleep(0.05)
            for pid in set(ranks) - set(codes):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        for pid in set(ranks) - set(codes):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        told = []
        for output in outputs:
            output.seek(0)
            told.append(output.read().decode())
        print(json.dumps([[codes.get(pid), text] for pid, text in zip(ranks, told)]), flush=True)


class Server:
    """Runs kinds of faults, one after the other; with ``debug`` under ``SHARDTENSOR_DEBUG=1``."""

    def __init__(self, debug=False):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["SHARDTENSOR_DEBUG"] = str(int(debug))
        environment["PYTHONPATH"] = str(Path(shardtensor.__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, kind):
        """Each rank's exit code (None: had to be ended) and output."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        print(json.dumps([kind, port]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def end_of(kind, outcomes):
    codes = [code for code, _ in outcomes]
    if codes.count(None) > ("freezes" in kind):
        return "hang"
    if -signal.SIGABRT in codes:
        return "abort"
    raised = [output for code, output in outcomes if code == 1]
    if raised:
        return "told" if all(map(NAMED.search, raised)) else "nameless"
    if any("UserWarning: DomainParallel" in output for _, output in outcomes):
        return "warned"
    return "right" if ENDS.get(kind) == "right" else "silent"


@pytest.fixture(scope="module")
def server():
    started = Server()
    yield started
    started.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "kernel: known" else pytest.mark.slow) for kind in KINDS]
)
def test_how_a_fault_ends(server, kind):
    outcomes = server.run(kind)
    end = end_of(kind, outcomes)
    assert end == ENDS.get(kind, "told"), "\n".join(output for _, output in outcomes)
    if end == "abort":
        assert any(code == -signal.SIGABRT and "gloo has failed in a thread" in output for code, output in outcomes)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_debug_mode_tells_before_messages_of_other_sizes_are_sent():
    server = Server(debug=True)
    try:
        for name in OTHER_SIZES:
            outcomes = server.run(f"{name}: known")
            text = f"{name}\n" + "\n".join(output for _, output in outcomes)
            assert end_of(name, outcomes) == "told" and "gloo has failed" not in text, text
    finally:
        server.close()


if __name__ == "__main__":
    serve()

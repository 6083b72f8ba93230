"""Training steps of whole networks: two ranks against one process, against half of the input alone, and a prediction.

    python benchmarks/bench_networks.py [--only NAME] [--seconds S] [--json FILE]
    python benchmarks/bench_networks.py --profile NAME

Two processes of one thread each, on gloo. Each round times four steps (zero the gradients, forward, loss, backward),
one after the other: "one", the global input on one process; "half", half the input on one process; "both", half the
input on both at once without a word between them; "two", the global input sharded in halves over both. A round's time
is the slower rank's. The other process waits in its socket during the first two. Half the input alone is the limit of
what two ranks can reach: it is the same local work without anything to communicate (but for attention, where every
query sees the keys of both halves). On both at once it takes longer where cores share caches, memory or their units.

Each network has four figures: two ranks' best time relative to half the input's, how many times as fast as one process
two ranks are, the same with twice the input, and the time of one rank's local work alone, on a fake process group where
nothing is sent, relative to half the input's: what is above it is communication and waiting. A fifth compares two
ranks' time with the one that ``benchmarks/machine.py`` predicts. "loss" is its relative difference from one process's,
in float32. A network whose package is missing is reported as such.

``--profile`` prints the operators that differ most between half the input and rank 0 of two; with ``--local`` on a fake
process group.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from machine import ASSUMED, Link, communication_time, measured_links
from networks import NETWORKS, Network, autoencoder, step
from peers import distvae
from report import FASTER, TIMES, Figure, best_and_median, chosen, finish, parser, seconds
from timing import Run, interleaved, on_rank_of_fake, on_ranks, slowest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardtensor import ShardTensor, scatter_tensor
from shardtensor.testing import Communication, count_communication

GROUP, MODEL = "networks on 2 ranks, a training step", "machine model"
ALONE = ("one", "half")
FASTER_TWICE = 1.8  # than one process, with twice the input


def steps_of(network: Network, mesh: DeviceMesh, shape: tuple[int, ...]) -> dict[str, Run]:
    """The four kinds of step, for a global input of this shape."""
    dim = network.dim
    torch.manual_seed(0)
    model = network.make()
    x = torch.randn(shape)
    half = x.narrow(dim, 0, shape[dim] // 2).contiguous()
    if network.alone:
        me = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("apart", "me"))["me"]
        local = {"one": x, "half": half}
        x, half = (
            ShardTensor.from_local(t, me, (Shard(dim),), shard_sizes={0: (t.shape[dim],)}) for t in local.values()
        )
        sharded = scatter_tensor(local["one"], mesh, (Shard(dim),))
    else:
        sizes = {0: tuple(t.shape[dim] for t in x.chunk(mesh.size(), dim))}
        mine = x.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()  # the seed is the same on all ranks
        sharded = ShardTensor.from_local(mine, mesh, (Shard(dim),), shard_sizes=sizes)
    inputs = {"one": x, "half": half, "both": half, "two": sharded}
    # What one process does alone changes running statistics of that process's model, which ranks have to have alike.
    models = {kind: copy.deepcopy(model) if kind in ALONE else model for kind in inputs}
    return {kind: lambda kind=kind, x=x: step(network, models[kind], x) for kind, x in inputs.items()}


def item(loss: Tensor) -> float:
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def measure(name: str, mesh: DeviceMesh, links: dict[str, Link], budget: float, quick: bool) -> list[Figure]:
    network = NETWORKS[name]
    title = f"{name}{TIMES}"
    try:
        steps = steps_of(network, mesh, network.shape)
    except ImportError as error:
        return [Figure(GROUP, title, None, bar=network.bar, note=f"{error.name} is not installed")]
    item(steps["two"]())  # the first step compares weights and makes plans
    with count_communication() as counted:
        loss = steps["two"]()
    found, expected = item(loss), item(steps["one"]())
    note = f"{sent(counted)}; loss {abs(found / expected - 1):.0e}"
    times = best_and_median(interleaved(steps, budget, 1 if quick else 4, 15, ALONE))
    best = times["best"]
    details = {"2 ranks / both": best["two"] / best["both"], "sent": plain(counted)}
    gain = f"{name}{FASTER}"
    figures = [
        Figure(GROUP, title, best["two"] / best["half"], bar=network.bar, **times, note=note, details=details),
        Figure(GROUP, gain, best["one"] / best["two"], bar=network.faster, at_least=True),
        prediction(name, best, counted, links),
    ]
    if network.faster and not quick:
        larger = steps_of(network, mesh, network.twice)
        times = best_and_median(interleaved({k: larger[k] for k in ("one", "two")}, budget / 2, 3, 15, ALONE))
        gain, value = f"{gain}, twice the input", times["best"]["one"] / times["best"]["two"]
        figures.insert(2, Figure(GROUP, gain, value, bar=FASTER_TWICE, at_least=True, **times))
    return figures


def local_work(mesh: DeviceMesh, names: Sequence[str], budget: float, quick: bool) -> dict[str, dict[str, list[float]]]:
    """The times of a step with half the input, and of one rank's part of a step on two ranks, with nothing sent."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        network = NETWORKS[name]
        if network.alone:  # a mesh of one rank, which a fake group has not
            continue
        try:
            steps = steps_of(network, mesh, network.shape)
        except ImportError:
            continue
        runs = {"half": steps["half"], "local": steps["two"]}
        found[name] = interleaved(runs, budget / 2, 1 if quick else 4, 15)
    return found


def of_local_work(name: str, times: dict[str, list[float]]) -> Figure:
    both = best_and_median(times)
    value = both["best"]["local"] / both["best"]["half"]
    return Figure(GROUP, f"{name}: local work alone of half the input's", value, **both)


def prediction(name: str, best: dict[str, float], counted: Communication, links: dict[str, Link]) -> Figure:
    predicted = best["both"] + communication_time(links, counted)
    efficiency = {kind: best["one"] / (2 * value) for kind, value in (("two", best["two"]), ("model", predicted))}
    assumed = seconds(communication_time(ASSUMED, counted))
    return Figure(
        MODEL,
        f"{name}: measured time of predicted",
        best["two"] / predicted,
        best={"both": best["both"], "predicted": predicted, "measured": best["two"]},
        note=f"efficiency {efficiency['model']:.0%} predicted, {efficiency['two']:.0%} measured; "
        f"communication on an assumed fast device {assumed}",
        details={"efficiency": efficiency},
    )


def plain(counted: Communication) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in vars(counted).items()}


def sent(counted: Communication) -> str:
    size = (counted.bytes_sent + counted.collective_bytes) / 2**20
    collectives = ", ".join(f"{n} {kind}" for kind, n in sorted(counted.collectives.items()))
    return f"{counted.messages} messages and {size:.2f} MiB a rank in {collectives}"


def against_distvae(mesh: DeviceMesh, budget: float) -> Figure:
    """Decoding a latent of 32 x 32 to an image of 256 x 256."""
    title = "AutoencoderKL decode, 32x32 latent: time of DistVAE's"
    try:
        torch.manual_seed(0)
        ours, theirs = (autoencoder(32, 64, 128, 128).eval() for _ in range(2))
        decode = distvae(theirs.decoder, mesh)
    except ImportError:
        return Figure(GROUP, title, None, bar=0.8, note="DistVAE is not installed")
    latent = torch.randn(1, 4, 32, 32)
    sharded = scatter_tensor(latent, mesh, (Shard(2),))
    with torch.no_grad():
        runs: dict[str, Run] = {
            "ShardTensor": lambda: ours.decode(sharded).sample,
            "DistVAE": lambda: decode(theirs.post_quant_conv(latent)),
        }
        times = best_and_median(interleaved(runs, budget, 5))
    return Figure(GROUP, title, times["best"]["ShardTensor"] / times["best"]["DistVAE"], bar=0.8, **times)


def of_links(links: dict[str, Link]) -> list[Figure]:
    return [
        Figure(
            MODEL,
            f"{kind} on this backend: latency",
            link.latency * 1e6,
            "us",
            note=f"{link.bandwidth / 1e9:.2f} GB/s of large operands",
            details={"bandwidth": link.bandwidth},
        )
        for kind, link in links.items()
    ]


# -- profile -----------------------------------------------------------------------------------------------------------


def compared(name: str, runs: dict[str, tuple[Run, bool]]) -> str:
    """Rank 0's operators of two kinds of step next to each other: ``{kind: (step, whether all ranks take it)}``."""
    tables = {}
    for kind, (run, together) in runs.items():
        slowest(run, together)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(3):
                slowest(run, together)
        tables[kind] = {e.key: (e.self_cpu_time_total / 3000, e.count / 3) for e in profiler.key_averages()}
    first, second = tables
    rows = []
    for key in {*tables[first], *tables[second]}:
        (a, n), (b, m) = (table.get(key, (0.0, 0.0)) for table in tables.values())
        rows.append((b - a, f"{key[:52]:52} {a:9.1f} {n:6.0f} {b:9.1f} {m:6.0f} {b - a:9.1f}"))
    totals = [sum(t for t, _ in table.values()) for table in tables.values()]
    head = f"{'milliseconds of a step, itself':52} {first:>9} {'calls':>6} {second:>9} {'calls':>6} {'more':>9}"
    lines = [head, f"{'all':52} {totals[0]:9.1f} {'':6} {totals[1]:9.1f} {'':6} {totals[1] - totals[0]:9.1f}"]
    return "\n".join([f"== {name}", *lines, *(line for _, line in sorted(rows, reverse=True)[:40])])


def profile(name: str, mesh: DeviceMesh) -> str:
    """A step with half the input alone next to one on two ranks."""
    network = NETWORKS[name]
    steps = steps_of(network, mesh, network.shape)
    return compared(name, {kind: (steps[kind], kind not in ALONE) for kind in ("half", "two")})


def profiles(mesh: DeviceMesh, names: Sequence[str]) -> str:
    return "\n".join(profile(name, mesh) for name in names)


# -- the command -------------------------------------------------------------------------------------------------------


def work(mesh: DeviceMesh, names: Sequence[str], budget: float, quick: bool) -> list[Figure]:
    links = measured_links(mesh, 2 if quick else 20)
    figures = of_links(links)
    for name in names:
        if dist.get_rank() == 0:
            print(f"measuring {name}", file=sys.stderr)
        figures += measure(name, mesh, links, budget, quick)
    figures.append(against_distvae(mesh, budget))
    return sorted(figures, key=lambda figure: figure.group == MODEL)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=10.0, help="for the rounds of a network")
    made.add_argument("--profile", metavar="NAME", help="operators of the networks whose name contains this")
    made.add_argument("--local", action="store_true", help="profile one rank's work with nothing sent")
    options = made.parse_args()
    names = chosen(options.profile or options.only, NETWORKS, made.error)
    if options.profile:
        print((on_rank_of_fake if options.local else on_ranks)(profiles, names))
        return
    budget = 0.1 if options.quick else options.seconds
    alone = on_rank_of_fake(local_work, names, budget, options.quick)
    figures = on_ranks(work, names, budget, options.quick)
    for name, times in alone.items():
        last = max(i for i, figure in enumerate(figures) if figure.group == GROUP and figure.name.startswith(name))
        figures.insert(last + 1, of_local_work(name, times))
    finish(figures, options)


if __name__ == "__main__":
    main()

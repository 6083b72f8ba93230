"""Operators on shards against the same local kernel without communication, DTensor, and what one writes by hand.

    python benchmarks/bench_operators.py [--only NAME] [--ranks N] [--seconds S] [--json FILE]

Each rank has a shard of the named shape. "local" is the same call in plain torch on that shard: wrong at the borders,
but the same work with nothing to send, which is the floor. The value is the ratio of the best times of ShardTensor and
of "local"; all kinds run on all ranks at once, and a round's time is the slowest rank's. Other kinds:

- "DTensor", where it has the operator; where its result differs from ours, or it refuses, the row says so.
- "by hand": a halo by all-to-all and concatenation, or a ring of isend and irecv.
- "PhysicsNeMo", where it is installed: a row of its own compares the time beyond "local".

The weights of the convolution are replicated DTensors, whose gradients stay contributions, so that no all-reduce is
timed; the weights of all other operators are plain tensors, whose gradients are summed over the ranks, while DTensor
leaves those of its weights Partial. For attention "local" has keys and values of the whole sequence; with ``is_causal``
it does what the last rank has to. For neighborhood attention it is our own tiles, which take the shard for the whole.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Halo, Ring
from operator_cases import CASES, Case, Place, Work, neighborhood
from peers import physicsnemo
from report import Figure, best_and_median, chosen, finish, parser
from timing import Run, interleaved, on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor

GROUP = "operators on shards, against the local kernel"
BEYOND = 0.5  # of PhysicsNeMo's time beyond the local kernel


def places(mesh: DeviceMesh) -> dict[str, Place]:
    """How each kind holds a shard, and a weight."""
    ranks = mesh.size()

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    def sharded(local: Tensor, dim: int) -> Tensor:
        sizes = {0: (local.shape[dim],) * ranks}
        return ShardTensor.from_local(local.clone(), mesh, (Shard(dim),), shard_sizes=sizes).requires_grad_()

    def dtensor(local: Tensor, dim: int) -> Tensor:
        return DTensor.from_local(local.clone(), mesh, (Shard(dim),)).detach().requires_grad_()

    def replicated(weight: Tensor) -> Tensor:
        return DTensor.from_local(weight.clone(), mesh, (Replicate(),)).detach().requires_grad_()

    held = {
        "local": Place("local", lambda local, dim: leaf(local), leaf, leaf, ranks),
        "ShardTensor": Place("ShardTensor", sharded, leaf, replicated, ranks),
        "DTensor": Place("DTensor", dtensor, replicated, replicated, ranks),
    }
    try:
        theirs = physicsnemo(mesh)
    except ImportError:
        return held
    return held | {
        "PhysicsNeMo": Place(
            "PhysicsNeMo", lambda local, dim: theirs(local, dim).detach().requires_grad_(), leaf, leaf, ranks
        )
    }


def by_hand(case: Case, place: Place, rank: int) -> Work | None:
    """The case written by hand on local tensors; None for those that nobody did."""
    if case.by_hand is None:
        return None
    call, inputs, gradient = case.make(place)
    if case.by_hand == "halo":
        x, weight = inputs
        return Work(lambda: F.conv2d(Halo.apply(x, rank, place.ranks), weight, padding=(0, 1)), (x, weight), gradient)
    mine = [t.detach().chunk(place.ranks, 2)[rank].contiguous().requires_grad_() for t in inputs[1:]]
    own = (inputs[0], *mine)
    return Work(lambda: Ring.apply(*own, rank, place.ranks, case.by_hand == "causal ring"), own, gradient)


def with_method(work: Work, method: str) -> Work:
    """Attention by this method."""

    def call() -> Any:
        with shardtensor.attention_method(method):
            return work.call()

    return work._replace(call=call)


def with_gradient_like(work: Work, result: Tensor) -> Work:
    """DTensor may choose another placement for a result; its gradient gets that, too."""
    return work._replace(gradient=work.gradient.redistribute(placements=result.placements))


def whole(result: Any) -> Tensor:
    """Also of PhysicsNeMo's tensors, which are no DTensors."""
    return result.full_tensor() if hasattr(result, "full_tensor") else result


def usable(works: dict[str, Work]) -> tuple[dict[str, Work], str]:
    """Without the kinds that refuse or give another result than ours, and a note that says which."""
    kept, notes = dict(works), []
    with torch.no_grad():
        ours = whole(works["ShardTensor"].call())
        for kind in ("DTensor", "PhysicsNeMo"):  # in one order on all ranks
            if kind not in works:
                continue
            try:
                result = works[kind].call()
                theirs = whole(result)
                if theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-3, atol=1e-3):
                    kept[kind] = with_gradient_like(works[kind], result)
                    continue
                notes.append(f"{kind}: wrong result")
            except Exception as error:  # of many types, the same one on every rank
                notes.append(f"{kind}: refused ({type(error).__name__})")
            del kept[kind]
    return kept, ", ".join(notes)


def run_of(work: Work, backward: bool) -> Run:
    def run() -> None:
        with torch.set_grad_enabled(backward):
            y = work.call()
            if backward:
                torch.autograd.grad(y, work.inputs, work.gradient)

    return run


def measure(case: Case, mesh: DeviceMesh, budget: float) -> list[Figure]:
    held = places(mesh)
    works, refused = {}, ""
    for kind, place in held.items():
        torch.manual_seed(0)  # equal values for all kinds
        try:
            works[kind] = case.make(place)
        except ImportError as error:
            return [Figure(GROUP, case.name, None, note=f"{error.name} is not installed")]
        except Exception as error:
            if kind != "PhysicsNeMo":
                raise
            refused = f"PhysicsNeMo: refused ({type(error).__name__})"
    manual = by_hand(case, held["local"], mesh.get_local_rank())
    works |= {"by hand": manual} if manual else {}
    works |= {method: with_method(works["ShardTensor"], method) for method in case.methods}
    works, note = usable(works)
    note = ", ".join(filter(None, (refused, note)))
    figures = []
    for title, bar in case.bars.items():
        runs = {kind: run_of(work, title != "forward") for kind, work in works.items()}
        for kind in ("DTensor", "PhysicsNeMo"):  # a forward pass that is right may have no backward pass
            try:
                runs.get(kind, lambda: None)()
            except Exception as error:
                note += f"{', ' if note else ''}{kind}, {title}: refused ({type(error).__name__})"
                del runs[kind]
        times = best_and_median(interleaved(runs, budget, least=1 if budget < 1 else 5))
        best = times["best"]
        value = best["ShardTensor"] / best["local"]
        name = f"{case.name}, {title}"
        figures.append(Figure(GROUP, name, value, bar=bar, **times, note=note))
        if "PhysicsNeMo" in runs:
            beyond = {kind: best[kind] - best["local"] for kind in ("ShardTensor", "PhysicsNeMo")}
            ratio = beyond["ShardTensor"] / beyond["PhysicsNeMo"]
            title = f"{name}: time beyond the local kernel, of PhysicsNeMo's"
            figures.append(Figure(GROUP, title, ratio, bar=BEYOND, best=beyond))
    return figures


def against_natten(mesh: DeviceMesh, quick: bool) -> Figure:
    """Forward of neighborhood attention on rank 0 alone, by natten's own CPU kernel and by ours."""
    import natten

    alone = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("apart", "alone"))["alone"]
    times: dict[str, list[float]] = {"natten on CPU": [], "ShardTensor": []}
    if mesh.get_local_rank() == 0:
        torch.manual_seed(0)
        tensors = list(torch.randn(3, *neighborhood.shape))
        size = {0: (neighborhood.shape[1],)}
        spread = [ShardTensor.from_local(t, alone, (Shard(1),), shard_sizes=size) for t in tensors]
        for kind, held, rounds in (("ShardTensor", spread, 10), ("natten on CPU", tensors, 1 if quick else 2)):
            for _ in range(rounds):
                start = time.perf_counter()
                with torch.no_grad():
                    natten.na2d(*held, kernel_size=neighborhood.kernel)
                times[kind].append(time.perf_counter() - start)
    dist.barrier()
    if not times["ShardTensor"]:
        return Figure(GROUP, "", None)
    name = "na2d, one rank, forward: as fast as natten on CPU"
    return Figure(
        GROUP, name, min(times["natten on CPU"]) / min(times["ShardTensor"]), "times", **best_and_median(times)
    )


def work(mesh: DeviceMesh, names: list[str], budget: float, quick: bool) -> list[Figure]:
    warnings.simplefilter("ignore")  # natten's CPU kernel is flex attention, which warns that it is slow
    figures: list[Figure] = []
    for name in names:
        if mesh.get_local_rank() == 0:
            print(f"measuring {name}", file=sys.stderr)
        figures += measure(CASES[name], mesh, budget)
        if CASES[name].natten and mesh.device_type == "cpu" and figures[-1].value is not None:
            figures.append(against_natten(mesh, quick))
    if "PhysicsNeMo" not in places(mesh):
        title = "any operator: time beyond the local kernel, of PhysicsNeMo's"
        figures.append(Figure(GROUP, title, None, bar=BEYOND, note="PhysicsNeMo is not installed"))
    return figures


def main() -> None:
    options = arguments()
    names = chosen(options.only, CASES, sys.exit)
    budget = 0.2 if options.quick else options.seconds
    finish(on_ranks(work, names, budget, options.quick, ranks=options.ranks), options)


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--seconds", type=float, default=4.0, help="for the rounds of a row")
    return made.parse_args()


if __name__ == "__main__":
    main()

"""Training steps of compiled networks on two ranks, against the same steps in eager mode.

    python benchmarks/bench_compile.py [--only NAME] [--seconds S] [--json FILE]
    python benchmarks/bench_compile.py --profile NAME

Each round times four steps one after the other, on two processes of one thread each, on gloo: "eager" and "compiled",
the input sharded in halves over both; "half" and "half compiled", half the input on both at once without a word between
them, by plain torch. The figure is the time of the compiled step relative to the eager one. What torch.compile gains
where there are no shards, the last two kinds, is in the row's details: no graph of ours can gain more.

With ``--quick`` graphs are not compiled by inductor, which takes minutes, but run as they were traced.

``--profile`` prints the operators that differ most between the eager and the compiled step on rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from bench_networks import compared, item, steps_of
from networks import NETWORKS, Network
from report import Figure, best_and_median, chosen, finish, parser
from timing import Run, interleaved, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

GROUP = "torch.compile on 2 ranks, a training step"
COMPILED = ("globe U-Net", "ViT")
BAR = 0.95


def compiled(network: Network, backend: str) -> Network:
    def make() -> nn.Module:
        module: nn.Module = torch.compile(network.make(), fullgraph=True, backend=backend)  # type: ignore[assignment]
        return module

    return replace(network, make=make)


def kinds_of(network: Network, mesh: DeviceMesh, backend: str = "inductor") -> dict[str, Run]:
    eager = steps_of(network, mesh, network.shape)
    sharded, plain = (steps_of(compiled(network, backend), mesh, network.shape) for _ in range(2))  # a graph each
    return {"eager": eager["two"], "compiled": sharded["two"], "half": eager["both"], "half compiled": plain["both"]}


def measure(name: str, mesh: DeviceMesh, budget: float, quick: bool) -> Figure:
    title = f"{name}: compiled step of an eager one's"
    try:
        kinds = kinds_of(NETWORKS[name], mesh, "aot_eager" if quick else "inductor")
    except ImportError as error:
        return Figure(GROUP, title, None, bar=BAR, note=f"{error.name} is not installed")
    difference = abs(item(kinds["compiled"]()) / item(kinds["eager"]()) - 1)
    times = best_and_median(interleaved(kinds, budget, 1 if quick else 4, 30))
    best, middle = times["best"], times["median"]
    return Figure(
        GROUP,
        title,
        best["compiled"] / best["eager"],
        bar=BAR,
        **times,
        note=f"of medians {middle['compiled'] / middle['eager']:.2f}x; loss {difference:.0e}",
        details={"of medians": middle["compiled"] / middle["eager"], "half": best["half compiled"] / best["half"]},
    )


def work(mesh: DeviceMesh, names: Sequence[str], budget: float, quick: bool) -> list[Figure]:
    figures = []
    for name in names:
        if dist.get_rank() == 0:
            print(f"measuring {name}", file=sys.stderr)
        figures.append(measure(name, mesh, budget, quick))
    return figures


def profiles(mesh: DeviceMesh, names: Sequence[str]) -> str:
    parts = []
    for name in names:
        kinds = kinds_of(NETWORKS[name], mesh)
        parts.append(compared(name, {kind: (kinds[kind], True) for kind in ("eager", "compiled")}))
    return "\n".join(parts)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=20.0, help="for the rounds of a network")
    made.add_argument("--profile", metavar="NAME", help="operators of the networks whose name contains this")
    options = made.parse_args()
    names = chosen(options.profile or options.only, COMPILED, made.error)
    if options.profile:
        print(on_ranks(profiles, names))
        return
    finish(on_ranks(work, names, 0.1 if options.quick else options.seconds, options.quick), options)


if __name__ == "__main__":
    main()

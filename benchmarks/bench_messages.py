"""Messages of a training step: which of them wait for each other, and what more ranks add. Counts, no times.

    python benchmarks/bench_messages.py [--only NAME] [--drawing NAME] [--json FILE]

**Chains.** A network's step runs as each of two ranks, in one process on the fake process group. For each collective it
is recorded on which collectives before it the data depend that it sends, through all operators on local tensors, on any
rank. Collectives can travel together only if none of them depends on another. So the longest chain of collectives that
depend on each other is the least number of messages, whatever is put together. ``--drawing`` prints where a network's
collectives are in the chains, module by module.

**Weak scaling.** ``shardtensor.explain`` counts what an inner rank sends, receives and keeps for backward on 3, 8 and
64 ranks, with as much input for each rank.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_graphs import MeshGraphNet, at_nodes, grid
from networks import NETWORKS, Network
from report import Figure, chosen, finish, parser
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_iter

import shardtensor
from shardtensor import ShardTensor
from shardtensor.observe.counting import Communication
from shardtensor.observe.explain.recording import WEIGHTS, Recorder
from shardtensor.observe.simulate import simulate_ranks
from shardtensor.ranks.history import here

CHAINS = "collectives of a training step on 2 ranks, relative to the longest chain of those that wait for each other"
WEAK = "what an inner rank of 64 sends and keeps, relative to one of 3 with as much input"
BAR = 1.05

# -- chains ------------------------------------------------------------------------------------------------------------


@dataclass
class Collective:
    """One of a step.

    Attributes:
        path, operator: the module that calls it, and the operator.
        phase: 0 in the forward pass, 1 in the backward pass.
        kind: "exchange", "all-reduce" or "all-gather".
        waits: numbers of those that it depends on, as bits.
        depth: how many are in the longest chain that ends with it.
    """

    path: str
    operator: str
    phase: int
    kind: str
    waits: int
    depth: int = 0


class Dependences(Recorder):
    """Records, of each collective, on which ones before it depends what it sends.

    By memory, as bits: what an operator returns or writes to depends on what all of its arguments do.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, values=True, plain=False)
        self.collectives: list[Collective] = []
        self._waits: dict[int, int] = {}

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = list(_memory((args, kwargs)))
        waits = self._of(given)
        result = super().compute(func, args, kwargs)
        for key in set(_memory(result)).difference(given):
            self._waits[key] = waits  # new memory, at an address that may have been another's
        names = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        written = [names.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        self._add(_memory(written), waits)
        return result

    def communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row, call = self.row(), Communication()
        call.add(func, args, kwargs)
        result = super().communicate(func, args, kwargs)
        tensors = [list(_memory(a)) for a in args if any(True for _ in _memory(a))]
        received, sent = tensors[0], tensors[-1]  # the same of an all-reduce
        waits, number = self._of(sent), len(self.collectives)
        (kind,) = call.collectives
        name = "exchange" if kind == "all_to_all" else kind.replace("_", "-")
        # A bucket that is full is sent by whatever has filled it, for no operator.
        bucket = kind == "all_reduce" and not here.operator
        path, operator = ("", WEIGHTS) if bucket else (row.path, row.operator)
        self.collectives.append(Collective(path, operator, self._phase, name, waits))
        self._add(received, waits | 1 << number)
        return result

    def _of(self, memory: Sequence[int]) -> int:
        waits = 0
        for key in memory:
            waits |= self._waits.get(key, 0)
        return waits

    def _add(self, memory: Any, waits: int) -> None:
        for key in memory:
            self._waits[key] = self._waits.get(key, 0) | waits


def _memory(tensors: Any) -> Iterator[int]:
    return (t.untyped_storage()._cdata for t in tree_iter(tensors) if isinstance(t, Tensor))


def recorded(network: Network) -> list[Collective]:
    """A step's, on this rank of the fake group."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = network.make()
    local = torch.zeros(network.half)
    sizes = (local.shape[network.dim],) * ranks
    x = ShardTensor.from_local(local, mesh, [Shard(network.dim)], shard_sizes={0: sizes})
    found: list[Collective] = []
    for _ in range(2):  # the first compares the ranks, too
        model.zero_grad()
        recorder = Dependences(model)
        with recorder.forward([x]):
            result = network.call(model, x)
        with recorder.loss():
            loss = result.square().mean()
        with recorder.backward():
            loss.backward()
        found = recorder.collectives
    return found


def collectives_of(network: Network) -> list[Collective]:
    """A step's, with what they wait for on any of two ranks."""
    found, others = simulate_ranks(recorded, 2, network)
    every: list[int] = []  # what each waits for, and what these do
    for one, other in zip(found, others, strict=True):
        assert (one.path, one.operator, one.kind) == (other.path, other.operator, other.kind)
        one.waits |= other.waits
        before = [i for i in range(len(every)) if one.waits >> i & 1]
        one.depth = 1 + max((found[i].depth for i in before), default=0)
        waits = one.waits
        for i in before:
            waits |= every[i]
        every.append(waits)
    return found


def longest(found: Sequence[Collective]) -> int:
    return max((one.depth for one in found), default=0)


def of_chain(name: str) -> Figure:
    found = collectives_of(NETWORKS[name])
    sums, chain = sum(one.operator == WEIGHTS for one in found), longest(found)
    note = f"{len(found)} collectives, {chain} of them one after the other; {sums} are sums of gradients of weights"
    return Figure(CHAINS, name, len(found) / chain, note=note, details={"collectives": len(found), "chain": chain})


def drawing(found: Sequence[Collective]) -> str:
    """A table of the modules: where in their chains the collectives of each are, in both passes."""
    rows: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for one in found:
        row = rows.setdefault((one.path, one.operator), ([], []))
        row[one.phase].append(f"{one.depth} {one.kind}")
    lines = ["| module | operator | forward | backward |", "|---|---|---|---|"]
    for (path, operator), (forward, backward) in rows.items():
        lines.append(f"| {path} | {operator} | {', '.join(forward)} | {', '.join(backward)} |")
    return "\n".join(lines)


# -- weak scaling ------------------------------------------------------------------------------------------------------

ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Growing:
    """A network whose input grows with the ranks.

    Attributes:
        model: called with the inputs.
        inputs: for a number of ranks: the tensors, which dim of each is sharded, and the sizes of their shards.
        apart: an operator of whose communication, memory and work a rank has more by its nature; "" for none.
        sends_more: why it sends more in a larger world, so that memory and work alone are compared; "" if it does not.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[list[Tensor], list[int], list[Any]]]
    apart: str = ""
    sends_more: str = ""


class Called(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.call = network.make(), network.call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.network, x)


def image(name: str, rows: int, columns: int, apart: str = "", sends_more: str = "") -> Growing:
    """One of the networks, with an image that has so many rows for each rank."""
    network = NETWORKS[name]

    def inputs(ranks: int) -> tuple[list[Tensor], list[int], list[Any]]:
        shape = *network.shape[:2], rows * ranks, columns, *network.shape[4:]
        return [torch.empty(shape, device="meta")], [2], [None]

    return Growing(lambda: Called(network), inputs, apart, sends_more)


def mesh(rows: int, columns: int) -> Growing:
    """A graph network on a mesh with so many rows of nodes for each rank."""

    def inputs(ranks: int) -> tuple[list[Tensor], list[int], list[Any]]:
        edges, nodes = grid(columns, diagonals=True, rows=rows * ranks), rows * ranks * columns
        sizes = tuple(at_nodes(edges, nodes, ranks))
        tensors = [torch.zeros(nodes, 3), torch.zeros(edges.shape[1], 3), edges]
        return tensors, [0, 0, 1], [None, sizes, sizes]

    return Growing(MeshGraphNet, inputs)


RANKS = 3, 8, 64
GROWING = {
    "globe U-Net": image("globe U-Net", 128, 256),
    "3-D U-Net (MONAI)": image("3-D U-Net (MONAI)", 32, 64),
    "SegFormer, attention apart": image("SegFormer", 256, 256, ATTENTION),
    "ViT, attention apart": image(
        "ViT", 128, 256, ATTENTION, "the embeddings of positions are plain, and their gradient grows with the image"
    ),
    "MeshGraphNet": mesh(16, 64),
    "Fourier operator": image(
        *("Fourier operator", 128, 256),
        sends_more="each of 16 transpositions sends all but a rank's own part, to all ranks that get some; "
        "of 64 ranks torch.chunk gives 43 three of the 129 columns of a spectrum each",
    ),
}
QUICK = {"globe U-Net": image("globe U-Net", 128, 16), "MeshGraphNet": mesh(4, 8)}


@dataclass
class Counts:
    """Of an inner rank's training step.

    Attributes:
        messages, sent: from rank to rank, with the bytes of its operands of collectives.
        collectives: reductions and all-gathers.
        kept: bytes for the backward pass.
        flops: of products and convolutions.
    """

    messages: int = 0
    sent: int = 0
    collectives: int = 0
    kept: int = 0
    flops: int = 0


def counted(growing: Growing, ranks: int) -> tuple[Counts, Counts]:
    """The middle rank's, without what is apart, and of that alone."""
    tensors, dims, sizes = growing.inputs(ranks)
    with torch.device("meta" if tensors[0].is_meta else "cpu"):
        model = growing.model()
    mine, values = ranks // 2, not tensors[0].is_meta  # those of an index, of which its neighbours know what they read
    around = [mine - 1, mine, mine + 1] if values else [mine]
    options: dict[str, Any] = {"mesh": ranks, "shard": dims, "shard_sizes": sizes, "backward": True, "only": around}
    found = shardtensor.explain(model, *tensors, **options, values=values)
    assert not found.refused and not found.stopped, found
    both = Counts(), Counts()
    for layer in found.layers:
        share, into = layer.shares[mine], both[layer.operator == growing.apart]
        into.messages += share.messages
        into.sent += share.bytes_sent
        into.collectives += share.collectives
        into.kept += share.saved_bytes
        into.flops += sum(share.flops)
    return both


def of_growth(name: str, growing: Growing, worlds: Sequence[int] = RANKS) -> Figure:
    found = {ranks: counted(growing, ranks) for ranks in worlds}
    first, *others = [alone for alone, _ in found.values()]
    compared = ("kept", "flops") if growing.sends_more else ("messages", "sent", "kept", "flops")
    value = max(getattr(each, key) / getattr(first, key) for each in others for key in compared)
    said = "; ".join(
        f"{ranks} ranks: {alone.messages} messages, {alone.collectives} reductions and gathers, "
        f"{alone.sent / 1e6:.3f} MB sent, {alone.kept / 1e6:.1f} MB kept"
        + (f", attention {apart.messages} messages, {apart.sent / 1e6:.1f} MB" if growing.apart else "")
        for ranks, (alone, apart) in found.items()
    )
    name += ": memory and work" if growing.sends_more else ""
    return Figure(WEAK, name, value, bar=BAR, note="; ".join(filter(None, (said, growing.sends_more))))


def main() -> None:
    warnings.filterwarnings("ignore")
    made = parser(__doc__)
    made.add_argument("--drawing", metavar="NAME", help="print the chains of this network's collectives, and end")
    options = made.parse_args()
    if options.drawing:
        for name in chosen(options.drawing, NETWORKS, made.error):
            print(name, drawing(collectives_of(NETWORKS[name])), sep="\n\n")
        return
    growing = QUICK if options.quick else GROWING
    rows: dict[str, Callable[[], Figure]] = {
        f"{name}, chains": partial(of_chain, name) for name in NETWORKS if not options.quick or name == "globe U-Net"
    }
    rows |= {f"{name}, weak scaling": partial(of_growth, name, each) for name, each in growing.items()}
    figures = []
    for name in chosen(options.only, rows, made.error):
        print(f"counting {name}", file=sys.stderr)
        figures.append(rows[name]())
    finish(figures, options)


if __name__ == "__main__":
    main()

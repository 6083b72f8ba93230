"""Host overhead: plain tensors, DTensor and ShardTensor on tiny tensors, sharded evenly along the batch.

    python benchmarks/bench_overhead.py [--only NAME] [--rounds N] [--number N] [--quick] [--json FILE]

Runs on the fake process group, in one process, so that nothing but Python and dispatch is timed: the CPU time of the
calling thread. Each round times the three kinds one after the other; the value is the median of the rounds' ratios of
ShardTensor to DTensor, which a machine that is slower at times does not move. Weights are plain tensors for
ShardTensor, replicated DTensors for DTensor. A kind that refuses is left out.

DTensor does less in some rows, as the collectives tell that each of the two starts per call, DTensor's and ours: it
leaves gradients of weights Partial, and its cross entropy is a mean of the ranks' means, which is wrong where ranks
ignore different numbers of targets. The rows named "complete" let it finish: its gradients are made as complete
as ours, its cross entropy is a sum divided by the number of all ranks' targets.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Figure, best_and_median, finish, parser
from timing import host_time
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtensor import ShardTensor

GROUP = "host time, against DTensor"
# A case gets the tensors by name; those of floating point require grad where its backward is timed, too.
Case = Callable[[dict[str, Any]], Any]
Rows = Iterator[tuple[str, dict[str, Callable[[], Any]]]]

POINTWISE: dict[str, Case] = {
    "x + x": lambda t: t["x"] + t["x"],
    "x * y": lambda t: t["x"] * t["y"],
    "relu": lambda t: torch.relu(t["x"]),
    "gelu": lambda t: F.gelu(t["x"]),
    "x * 2.0": lambda t: t["x"] * 2.0,
    "x.add_(1.0)": lambda t: t["x"].add_(1.0),
    "where": lambda t: torch.where(t["x"] > 0, t["x"], t["y"]),
    "x.to(float64)": lambda t: t["x"].to(torch.float64),
}
OTHERS: dict[str, Case] = {
    "transpose": lambda t: t["x"].transpose(1, 2),
    "view": lambda t: t["x"].view(8, 2, 2, 6),
    "slice": lambda t: t["x"][:, 1:3],
    "cat": lambda t: torch.cat([t["x"], t["y"]], 1),
    "sum(1)": lambda t: t["x"].sum(1),
    "mean, left Partial": lambda t: t["x"].mean(),
    "amax(-1)": lambda t: t["x"].amax(-1),
    "softmax": lambda t: t["x"].softmax(-1),
    "linear": lambda t: F.linear(t["x"], t["weight"], t["bias"]),
    "matmul": lambda t: t["x"] @ t["z"],
    "conv2d": lambda t: F.conv2d(t["image"], t["kernel"], t["channels"], padding=1),
    "max_pool2d": lambda t: F.max_pool2d(t["image"], 2),
    "layer_norm": lambda t: F.layer_norm(t["x"], (6,), t["scale"], t["scale"]),
    "group_norm": lambda t: F.group_norm(t["image"], 2, t["channels"], t["channels"]),
    "mse_loss": lambda t: F.mse_loss(t["x"], t["y"]),
    "cross_entropy": lambda t: F.cross_entropy(t["logits"], t["classes"]),
    "cross_entropy complete": lambda t: mean_over_all_targets(t),
    "attention": lambda t: F.scaled_dot_product_attention(t["heads"], t["heads"], t["heads"]),
    "x.shape": lambda t: t["x"].shape,
}


def chain(t: dict[str, Any]) -> Any:
    return torch.tanh(torch.relu(t["x"] * 2.0)) + t["x"]


def perceptron(t: dict[str, Any]) -> Any:
    return F.linear(F.gelu(F.layer_norm(t["x"], (6,), t["scale"], t["scale"])), t["weight"], t["bias"])


def mean_over_all_targets(t: dict[str, Any]) -> Any:
    if type(t["logits"]) is not DTensor:
        return F.cross_entropy(t["logits"], t["classes"])
    return F.cross_entropy(t["logits"], t["classes"], reduction="sum") / (t["classes"] != -100).sum()


def backward(case: Case, t: dict[str, Any], names: tuple[str, ...], complete: bool = False) -> Callable[[], Any]:
    inputs = [t[name] for name in names]
    seed: list[Any] = []

    def run() -> None:
        y = case(t)
        if not seed:
            seed.append(torch.ones_like(y.detach()))
        grads = torch.autograd.grad(y, inputs, seed[0])
        if complete:
            for grad, tensor in zip(grads, inputs):
                if type(grad) is DTensor and grad.placements != tensor.placements:
                    grad.redistribute(placements=tensor.placements)

    return run


def to_leaves(case: Case, t: dict[str, Any]) -> Callable[[], Any]:
    def run() -> None:
        case(t).sum().backward()
        for leaf in t.values():
            leaf.grad = None

    return run


WEIGHTS = ("weight", "bias", "scale", "kernel", "channels")

# name: case and the tensors to differentiate for
BACKWARD: dict[str, tuple[Case, tuple[str, ...]]] = {
    "pointwise chain": (chain, ("x",)),
    "transpose": (OTHERS["transpose"], ("x",)),
    "view": (OTHERS["view"], ("x",)),
    "slice": (OTHERS["slice"], ("x",)),
    "cat": (OTHERS["cat"], ("x", "y")),
    "sum(1)": (OTHERS["sum(1)"], ("x",)),
    "softmax": (OTHERS["softmax"], ("x",)),
    "linear": (OTHERS["linear"], ("x", "weight", "bias")),
    "matmul": (OTHERS["matmul"], ("x", "z")),
    "conv2d": (OTHERS["conv2d"], ("image", "kernel", "channels")),
    "layer_norm": (OTHERS["layer_norm"], ("x", "scale")),
    "mse_loss": (OTHERS["mse_loss"], ("x",)),
    "cross_entropy": (OTHERS["cross_entropy"], ("logits",)),
    "norm, gelu, linear": (perceptron, ("x", "scale", "weight", "bias")),
}


def row(name: str, runs: dict[str, Callable[[], Any]], options: argparse.Namespace) -> Figure:
    """Of ShardTensor's time relative to DTensor's; without a value where DTensor refuses."""
    possible, sent = {}, []
    for kind, run in runs.items():
        try:
            with CommDebugMode() as mode:
                run()
        except (RuntimeError, NotImplementedError):
            continue
        possible[kind] = run
        sent.append(f"{kind} {mode.get_total_counts()}")
    rounds = [
        {kind: host_time(run, options.number) for kind, run in possible.items()} for _ in range(options.rounds + 1)
    ][1:]
    times = {kind: [taken[kind] for taken in rounds] for kind in possible}
    ratio = median(taken["ShardTensor"] / taken["DTensor"] for taken in rounds) if "DTensor" in possible else None
    note = f"collectives: {', '.join(sent[1:])}" if "DTensor" in possible else "DTensor refuses"
    return Figure(GROUP, name, ratio, **best_and_median(times), note=note)


def tensors(mesh: DeviceMesh, requires_grad: bool) -> dict[str, dict[str, Any]]:
    """Of each kind, by name; those of floating point may require grad."""
    batches = {
        "x": torch.randn(8, 4, 6),
        "y": torch.randn(8, 4, 6),
        "z": torch.randn(8, 6, 4),
        "image": torch.randn(8, 4, 4, 4),
        "heads": torch.randn(8, 2, 4, 6),
        "logits": torch.randn(8, 5),
        "classes": torch.randint(5, (8,)),
    }
    weights = {
        "weight": torch.randn(6, 6),
        "bias": torch.randn(6),
        "scale": torch.randn(6),
        "kernel": torch.randn(4, 4, 3, 3),
        "channels": torch.randn(4),
    }

    def leaf(t: Any) -> Any:
        return t.requires_grad_(requires_grad and t.is_floating_point())

    def local(t: torch.Tensor) -> torch.Tensor:
        return t[:4].clone()

    cut, sizes = [Shard(0)], {0: (4, 4)}
    return {
        "plain": {n: leaf(t.clone()) for n, t in {**batches, **weights}.items()},
        "DTensor": {
            **{n: leaf(DTensor.from_local(local(t), mesh, cut)) for n, t in batches.items()},
            **{n: leaf(distribute_tensor(t, mesh, [Replicate()])) for n, t in weights.items()},
        },
        "ShardTensor": {
            **{n: leaf(ShardTensor.from_local(local(t), mesh, cut, shard_sizes=sizes)) for n, t in batches.items()},
            **{n: leaf(t.clone()) for n, t in weights.items()},
        },
    }


def without_gradients(mesh: DeviceMesh) -> Rows:
    kinds = tensors(mesh, requires_grad=False)
    for name, case in {**POINTWISE, **OTHERS}.items():
        yield name, {kind: (lambda t=t, case=case: case(t)) for kind, t in kinds.items()}


def with_gradients(mesh: DeviceMesh) -> Rows:
    kinds = tensors(mesh, requires_grad=True)
    for name, (case, names) in BACKWARD.items():
        yield f"{name}, grad()", {kind: backward(case, t, names) for kind, t in kinds.items()}
        if set(names) & set(WEIGHTS):
            runs = {kind: backward(case, t, names, complete=True) for kind, t in kinds.items()}
            yield f"{name}, grad() complete", runs
    runs = {kind: backward(mean_over_all_targets, t, ("logits",)) for kind, t in kinds.items()}
    yield "cross_entropy complete, grad()", runs
    yield "chain, sum, backward()", {kind: to_leaves(chain, t) for kind, t in kinds.items()}
    local, sizes = torch.randn(4, 4, 6), {0: (4, 12)}
    yield (
        "from_local, to_local",
        {
            "plain": lambda: local,
            "DTensor": lambda: DTensor.from_local(local, mesh, [Replicate()]).to_local(),
            "ShardTensor": lambda: ShardTensor.from_local(local, mesh, [Shard(0)], shard_sizes=sizes).to_local(),
        },
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=51)
    made.add_argument("--number", type=int, default=20)
    options = made.parse_args()
    if options.quick:
        options.rounds = 2
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh, figures = init_device_mesh("cpu", (2,)), []
    for grad, rows in ((False, without_gradients), (True, with_gradients)):
        with torch.set_grad_enabled(grad):
            figures += [row(name, runs, options) for name, runs in rows(mesh) if options.only in name]
    finish(figures, options)


if __name__ == "__main__":
    main()

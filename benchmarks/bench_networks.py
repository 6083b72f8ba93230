"""Training steps of whole networks: two ranks against one process, and against half of the input alone.

    python benchmarks/bench_networks.py [--only NAME] [--rounds N] [--json FILE]
    python benchmarks/bench_networks.py --profile NAME

Two processes of one thread each, on gloo. Each round times four steps (zero the gradients, forward, loss, backward),
one after the other: of the whole input on one process, of half the input on one process, of half the input on both at
once without a word between them, and of the whole input sharded in halves over both, as seen by rank 0 from one barrier
to the next. The other process waits in its socket during the first two. Half the input alone is the limit of what two
ranks can reach: it is the same local work without anything to communicate (but for attention, where every query sees
the keys of both halves). On both at once it takes longer where cores share caches, memory or their units.

"best" and "median" are over the rounds, in milliseconds. "/ half" is two ranks' best against the half's, "/ both"
against that on both at once, "x one" how many times faster than one process two ranks are. "error" is the loss's
relative difference from one process's, in float32. The networks are other packages': diffusers and transformers from
``.[test]``, MONAI from ``.[bench]``; rows whose package is missing are left out. A missed bar is marked, and is no
error: the exit code is 0.

``--profile`` prints the operators that differ most between half the input and rank 0 of two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor, scatter_tensor
from shardtensor.testing import count_communication

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "globe"))

Step = Callable[[], Tensor]
KINDS = ("one", "half", "both", "two")


@dataclass(frozen=True)
class Network:
    """One line of the table.

    Attributes:
        make: imports its package, and makes the module.
        shape, dim: of the input, and which dim is cut.
        bar: two ranks' time relative to half the input's.
        call: the result for an input.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dim: int
    bar: float = 1.25
    call: Callable[[nn.Module, Tensor], Tensor] = lambda network, x: network(x)


def globe() -> nn.Module:
    from model import UNet  # examples/globe

    return UNet()


def unet_3d() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(3, 1, 3, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)


def decoder() -> nn.Module:
    from diffusers import AutoencoderKL

    blocks = {"block_out_channels": (32, 64), "layers_per_block": 2, "norm_num_groups": 8}
    coder = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(latent_channels=4, **blocks, **coder)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    size = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3, "num_hidden_layers": 4}
    config = ViTConfig(image_size=384, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **size)
    return ViTModel(config, add_pooling_layer=False)


def segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    config = SegformerConfig(num_labels=4, drop_path_rate=0.0, **dropout)
    network: nn.Module = SegformerForSemanticSegmentation(config)
    return network


NETWORKS = {
    "globe U-Net": Network(globe, (1, 3, 384, 768), 2),
    "3-D U-Net (MONAI)": Network(unet_3d, (1, 1, 64, 64, 64), 2),
    "AutoencoderKL decoder": Network(decoder, (1, 4, 64, 64), 2, call=lambda m, x: m.decode(x).sample),
    "ViT": Network(
        vit, (1, 3, 384, 384), 2, 1.5, lambda m, x: m(x, interpolate_pos_encoding=True).last_hidden_state
    ),
    "SegFormer": Network(segformer, (1, 3, 512, 512), 2, call=lambda m, x: m(x).logits),
}


def step(network: Network, model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss = network.call(model, x).square().mean()
    loss.backward()
    return loss.detach()


def steps_of(network: Network, mesh: DeviceMesh) -> dict[str, Step]:
    torch.manual_seed(0)
    model = network.make()
    whole = torch.randn(network.shape)
    half = whole.narrow(network.dim, 0, network.shape[network.dim] // 2).contiguous()
    sharded = scatter_tensor(whole, 0, mesh, (Shard(network.dim),))
    inputs = {"one": whole, "half": half, "both": half, "two": sharded}
    return {kind: lambda x=x: step(network, model, x) for kind, x in inputs.items()}


def timed(run: Step, together: bool, rank: int) -> tuple[float, Tensor | None]:
    """Seconds from one barrier to the next; with ``together`` both ranks run, else rank 0 alone."""
    dist.barrier()
    start = time.perf_counter()
    loss = run() if together or rank == 0 else None
    if together:
        dist.barrier()
    return time.perf_counter() - start, loss


def measure(name: str, rounds: int, mesh: DeviceMesh) -> dict[str, Any] | None:
    network, rank = NETWORKS[name], dist.get_rank()
    try:
        steps = steps_of(network, mesh)
    except ImportError as error:
        return {"name": name, "missing": str(error)}
    losses: dict[str, Tensor | None] = {}
    with count_communication() as counted:
        losses["two"] = steps["two"]()
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for i in range(rounds + 1):  # the first one fills the caches
        for kind, run in steps.items():
            spent, loss = timed(run, kind in ("both", "two"), rank)
            losses[kind] = loss
            if i:
                seconds[kind].append(spent)
    two = losses["two"]
    value = two.full_tensor() if isinstance(two, ShardTensor) else two
    if rank:
        return None
    one = losses["one"]
    assert one is not None and value is not None
    best = {kind: min(values) for kind, values in seconds.items()}
    return {
        "name": name,
        "best": best,
        "median": {kind: median(values) for kind, values in seconds.items()},
        "against half": best["two"] / best["half"],
        "against both": best["two"] / best["both"],
        "faster than one": best["one"] / best["two"],
        "bar": network.bar,
        "error": abs((value - one) / one).item(),
        "sent": {key: dict(value) if isinstance(value, dict) else value for key, value in vars(counted).items()},
    }


# -- profile -----------------------------------------------------------------------------------------------------------


def profile(name: str, mesh: DeviceMesh) -> str:
    """Rank 0's operators of a step with half the input alone next to those of a step on two ranks."""
    steps, tables = steps_of(NETWORKS[name], mesh), {}
    for kind in ("half", "two"):
        run, together = steps[kind], kind == "two"
        timed(run, together, dist.get_rank())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(3):
                timed(run, together, dist.get_rank())
        tables[kind] = {e.key: (e.self_cpu_time_total / 3000, e.count / 3) for e in profiler.key_averages()}
    rows = []
    for key in {*tables["half"], *tables["two"]}:
        (a, n), (b, m) = (tables[kind].get(key, (0.0, 0.0)) for kind in ("half", "two"))
        rows.append((b - a, f"{key[:52]:52} {a:9.1f} {n:6.0f} {b:9.1f} {m:6.0f} {b - a:9.1f}"))
    totals = [sum(t for t, _ in tables[kind].values()) for kind in ("half", "two")]
    head = f"{'milliseconds of a step, itself':52} {'half':>9} {'calls':>6} {'two':>9} {'calls':>6} {'more':>9}"
    lines = [head, f"{'all':52} {totals[0]:9.1f} {'':6} {totals[1]:9.1f} {'':6} {totals[1] - totals[0]:9.1f}"]
    return "\n".join(lines + [line for _, line in sorted(rows, reverse=True)[:40]])


# -- the command -------------------------------------------------------------------------------------------------------


def work(rank: int, store: str, names: Sequence[str], rounds: int, profiled: bool, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(minutes=10), world_size=2, rank=rank)
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        result = profile(name, mesh) if profiled else measure(name, rounds, mesh)
        if rank == 0:
            results.put(result)
    dist.destroy_process_group()


def line(row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"{row['name']:24} left out: {row['missing']}"
    figures = [row[figure][kind] * 1e3 for kind in KINDS for figure in ("best", "median")]
    times = "".join(f"{figure:8.1f}" for figure in figures)
    met = "met" if row["against half"] <= row["bar"] else "missed"
    sent = row["sent"]
    collectives = " ".join(f"{n} {kind}" for kind, n in sorted(sent["collectives"].items()))
    return (
        f"{row['name']:24}{times} {row['against half']:7.2f} {row['bar']:5.2f} {met:7}{row['against both']:6.2f} "
        f"{row['faster than one']:6.2f} "
        f"{row['error']:8.0e}  {(sent['bytes_sent'] + sent['collective_bytes']) / 2**20:7.2f} MiB: {collectives}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--profile", metavar="NAME", help="operators of the networks whose name contains this")
    options = parser.parse_args()
    wanted = options.profile or options.only
    names = [name for name in NETWORKS if wanted.lower() in name.lower()]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", names, options.rounds, bool(options.profile), results)
        ranks = mp.spawn(work, arguments, nprocs=2, join=False)
        assert ranks is not None
        if not options.profile:
            kinds = "".join(f"{kind:>8}{'median':>8}" for kind in KINDS)
            ratios = f"{'/ half':>7} {'bar':>5} {'':7}{'/ both':>6} {'x one':>6}"
            print(f"{'milliseconds, best of':24}{kinds} {ratios} {'error':>8}  sent")
        found = []
        for name in names:
            while results.empty() and not ranks.join(timeout=0.2):
                pass
            result = results.get()
            found.append(result)
            print(f"== {name}\n{result}" if options.profile else line(result), flush=True)
        while not ranks.join():
            pass
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

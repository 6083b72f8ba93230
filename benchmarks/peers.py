"""Other packages that shard an input. None is a dependency: the pages leave out the rows of those that are missing.

    python benchmarks/peers.py [--tokens 4096]    needs nvidia-physicsnemo

runs operators and networks of ours, of the kinds that PhysicsNeMo's examples have, by its ShardTensor and by this
package's, on two ranks of a CPU with even and uneven shards, without gradients. It writes what is as in one process,
what is not, and what is refused into benchmarks/results/peers.json. Times of both need several GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import about
from timing import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.observe.counting import Communication
from shardtensor.testing import count_communication

# What packages communicate in operators of their own, which nobody sees who counts around these.
INSIDE = Communication()


def physicsnemo(mesh: DeviceMesh) -> Callable[[Tensor, int], Tensor]:
    """Makes PhysicsNeMo's ShardTensor of a shard and its dim; ImportError where it is not installed."""
    from physicsnemo.domain_parallel import ShardTensor, register_custom_ops

    if not torch.cuda.is_available():
        register_custom_ops()  # which importing it does only next to a GPU

    def sharded(local: Tensor, dim: int) -> Any:
        # Given, because it infers sizes by way of a GPU.
        return ShardTensor.from_local(local, mesh, (Shard(dim),), sharding_shapes={0: (local.shape,) * mesh.size()})

    return sharded


def physicsnemo_halo(lent: list[Tensor], counts: list[list[int]], own: int, mesh: DeviceMesh) -> Callable[..., Tensor]:
    """PhysicsNeMo's correction of sums in rows of which each rank has its own and, behind them, copies of others':
    what copies got is added to the originals, which are copied again. ImportError where it is not installed.

    Args:
        lent: for each rank, which of this one's rows it has copies of.
        counts: how many rows each rank lends to each.
    """
    from physicsnemo.domain_parallel.shard_utils import halo_scatter

    exchanged = halo_scatter._scatter_correct_dense

    def counting(*args: Any) -> Tensor:
        with count_communication() as counted:
            rows: Tensor = exchanged(*args)
        INSIDE.include(counted)
        return rows

    halo_scatter._scatter_correct_dense = counting
    routing = halo_scatter.pack_halo_routing(lent, counts, own, mesh.get_local_rank(), mesh.size())
    return lambda rows: halo_scatter.halo_scatter_correct(rows, routing, mesh.get_group())


def distvae(decoder: nn.Module, mesh: DeviceMesh) -> Any:
    """DistVAE's form of diffusers' decoder, which takes the whole latent; ImportError where it is not installed."""
    from distvae.modules.adapters.vae.decoder_adapters import DecoderAdapter

    group: dist.ProcessGroup = mesh.get_group()
    return DecoderAdapter(decoder, vae_group=group)


def anemoi_block(width: int, edge_width: int, heads: int) -> nn.Module:
    """A block of anemoi-models' graph transformer, which shards by itself where it is given a process group;
    ImportError where it is not installed.
    """
    from anemoi.models.layers.block import GraphTransformerProcessorBlock
    from anemoi.models.layers.utils import load_layer_kernels

    return GraphTransformerProcessorBlock(
        in_channels=width,
        hidden_dim=2 * width,
        out_channels=width,
        num_heads=heads,
        edge_dim=edge_width,
        layer_kernels=load_layer_kernels(),
        graph_attention_backend="pyg",
    )


# -- the same programs by both -----------------------------------------------------------------------------------------

SIZES = (8, 8), (12, 4), (9, 7)  # of the shards of 16 rows


class HybridTransformer(nn.Module):
    """Patches by a convolution, a transformer layer over their tokens, and a convolution over their grid again."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, width, 2, stride=2), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(tokens).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.mix(x + mixed.transpose(1, 2).unflatten(2, x.shape[2:]))


def conv_net() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))


def programs() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "convolution, 3 x 3": nn.Conv2d(3, 4, 3, padding=1),
        "convolution, 3 x 3, stride 2": nn.Conv2d(3, 4, 3, stride=2, padding=1),
        "max pooling, 2 x 2": nn.MaxPool2d(2),
        "mean squared error": lambda x: F.mse_loss(x, torch.zeros_like(x)),
        "mean": lambda x: x.mean(),
        "ConvNet": conv_net(),
        "hybrid vision transformer": HybridTransformer(),
    }


def outcome(run: Callable[[], Any], expected: Tensor) -> str:
    """What all ranks say of it; "right" if the result is that of one process."""
    try:
        result = run().full_tensor()
        same = result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
        said = "right" if same else "other numbers" if result.shape == expected.shape else "another shape"
    except Exception as error:  # whatever a package raises
        text = str(error).partition("\n")[0][:100]
        said = "not on a CPU" if "not compiled with CUDA" in text else f"{type(error).__name__}: {text}"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    return "; ".join(dict.fromkeys(every))


@torch.no_grad()
def compared(mesh: DeviceMesh, tokens: int) -> list[dict[str, Any]]:
    """A row for each program and shard sizes."""
    from physicsnemo.domain_parallel import ShardTensor as Theirs

    physicsnemo(mesh)
    rows: list[dict[str, Any]] = []

    def compare(name: str, run: Callable[..., Any], sizes: tuple[int, ...], *whole: Tensor) -> None:
        parts = [[part.contiguous() for part in each.split(list(sizes), 2)] for each in whole]
        mine = [each[mesh.get_local_rank()] for each in parts]
        shapes = [tuple(part.shape for part in each) for each in parts]
        where, expected = (mesh, (Shard(2),)), run(*whole)
        theirs = [Theirs.from_local(t, *where, sharding_shapes={0: s}) for t, s in zip(mine, shapes)]
        ours = [ShardTensor.from_local(t, *where, shard_sizes=sizes) for t in mine]
        by = {"PhysicsNeMo": theirs, "shardtensor": ours}
        said = {package: outcome(partial(run, *given), expected) for package, given in by.items()}
        rows.append({"program": name, "shards": sizes, **said})

    torch.manual_seed(0)
    for name, run in programs().items():
        for sizes in SIZES:
            compare(name, run, sizes, torch.randn(1, 3, sum(sizes), 12))
    for count in (1024, tokens):
        for sizes in ((count // 2, count // 2), (count // 2 + 100, count // 2 - 100)):
            qkv = (torch.randn(1, 2, count, 32) for _ in range(3))
            compare(f"attention, {count:,} tokens", F.scaled_dot_product_attention, sizes, *qkv)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the longer attention")
    rows = on_ranks(compared, parser.parse_args().tokens)
    for row in rows:
        print(f"{row['program']:30} {row['shards']!s:14} {row['PhysicsNeMo'][:60]:60} {row['shardtensor']}")
    packages = {"physicsnemo": metadata.version("nvidia-physicsnemo")}
    content = {"about": about() | packages, "rows": rows}
    (Path(__file__).parent / "results" / "peers.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

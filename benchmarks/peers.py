"""Other packages that shard an input. None is a dependency: the pages leave out the rows of those that are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

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

"""An autoencoder of diffusers over several ranks, by this package and by DistVAE."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh

Sizes = Mapping[int, tuple[int, ...]]


def by_shardtensor(
    vae: nn.Module, mesh: DeviceMesh, dim: int, code_sizes: Sizes | None = None, image_sizes: Sizes | None = None
) -> None:
    """Shard what the encoder and the decoder of an autoencoder are given, from dim `dim` on; all results stay plain.
    Some video decoders get a cache with it, which holds what they have put there."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from shardtensor.parallel import DomainParallel

    layouts = {
        "inputs": [tuple(Shard(dim + axis) for axis in range(mesh.ndim))],
        "outputs": (Replicate(),) * mesh.ndim,
    }
    plan = {
        "encoder": DomainParallel(**layouts, shard_sizes=image_sizes),
        "decoder": DomainParallel(**layouts, shard_sizes=code_sizes),
    }
    parallelize_module(vae, mesh, plan)


def by_distvae(vae: Any, mesh: DeviceMesh) -> None:
    """The same by DistVAE; ImportError where it is not installed, ValueError where it has no form of this one."""
    from distvae.vae import parallelize_decoder, parallelize_encoder

    parallelize_encoder(vae, mesh.get_group())
    parallelize_decoder(vae, mesh.get_group())


def has_distvae(vae: Any) -> bool | None:
    """Whether DistVAE has a form of this autoencoder's decoder; None where it is not installed."""
    try:
        from distvae.vae import decoder_adapter_name
    except ImportError:
        return None
    return decoder_adapter_name(vae) is not None

"""Tools to test distributed operators, of this package and your own.

- :func:`run_distributed` and :func:`run_expecting_errors` call a function on every rank of a pool of processes. There,
  :func:`shared_mesh` returns a mesh.
- :func:`assert_matches_unsharded` compares a function on shards with the same on global tensors, gradients included;
  :func:`shard` makes a ShardTensor of a global tensor.
- :func:`on_device` gives the ranks devices other than the CPU.
- :func:`count_communication` counts messages, bytes and collectives.
- :func:`simulate_ranks` runs a function as each rank of a large world in turn, without processes.

``import shardtensor`` does not import this package.
"""

from ..observe.counting import Communication, count_communication
from ..observe.simulate import simulate_ranks
from .failures import DistributedFailure, RemoteError
from .mesh import shared_mesh
from .oracle import assert_matches_unsharded, shard
from .pool import TooFewDevices, on_device, run_distributed, run_expecting_errors, shutdown_pools

__all__ = [
    "Communication",
    "DistributedFailure",
    "RemoteError",
    "TooFewDevices",
    "assert_matches_unsharded",
    "count_communication",
    "on_device",
    "run_distributed",
    "run_expecting_errors",
    "shard",
    "shared_mesh",
    "shutdown_pools",
    "simulate_ranks",
]

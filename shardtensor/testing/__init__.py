"""Tools to test distributed operators, ours and users' own.

- :func:`run_distributed` calls a function on every rank of a pool of processes.
"""

from .failures import DistributedFailure, RemoteError
from .mesh import shared_mesh
from .pool import run_distributed, run_expecting_errors, shutdown_pools

__all__ = [
    "DistributedFailure",
    "RemoteError",
    "run_distributed",
    "run_expecting_errors",
    "shared_mesh",
    "shutdown_pools",
]

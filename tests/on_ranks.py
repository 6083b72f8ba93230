"""Tests that run on ranks, written as one function."""

from __future__ import annotations

import functools
import math

from shardtensor.testing import run_distributed


def on_ranks(world_size, *, timeout=60.0):
    """Run a test function at module level once per rank of the pool. The test passes if all ranks return.

    Its arguments, parameters and values of fixtures alike, go to the ranks, so they must be picklable. This decorator
    stands next to the function, below pytest's marks.

    Args:
        world_size: the number of ranks, or the name of the argument that is this number or the shape of a mesh.
        timeout: seconds after which ranks that have not returned count as hung.

    >>> @pytest.mark.parametrize("mesh_shape", [2, (2, 2)])
    ... @on_ranks("mesh_shape")
    ... def test_meshes(mesh_shape):
    ...     assert shared_mesh(mesh_shape).size() == dist.get_world_size()
    """

    def on_these_ranks(test):
        @functools.wraps(test)
        def in_parent(**arguments):
            shape = arguments[world_size] if isinstance(world_size, str) else world_size
            ranks = math.prod(shape) if isinstance(shape, tuple) else shape
            run_distributed(test, ranks, timeout=timeout, **arguments)

        # Workers find a function by its qualified name, and the test's own is now that of what runs in the parent.
        in_parent.on_each_rank = test
        test.__qualname__ += ".on_each_rank"
        return in_parent

    return on_these_ranks

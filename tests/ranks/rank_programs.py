"""A process for each rank of a program, for tests of what ends or hangs a rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import shardtensor


def start(program: Path, world: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """One process for each rank, whose output is one text; ``communicate()`` closes its input."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": str(Path(shardtensor.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    return [
        subprocess.Popen(
            [sys.executable, str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"RANK": str(rank)},
        )
        for rank in range(world)
    ]

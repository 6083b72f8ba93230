"""Two hosts on one machine: network namespaces with names of their own and one cable between them.

Needs root and ``ip``. Files are shared, as on a cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shardtensor

ROOT = Path(shardtensor.__file__).parents[1]
NAMES, ADDRESSES = ("first", "second"), ("10.123.45.1", "10.123.45.2")
RANKS = 2  # of each host
# What ``ip netns exec`` does not: a host name.
_NAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def can_be_made() -> bool:
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid():
        return False
    made = _ip("netns", "add", "shardtensor-try", check=False).returncode == 0
    _ip("netns", "del", "shardtensor-try", check=False)
    return made


class Host:
    """One of the two, by its number; the rendezvous is on the first.

    Attributes:
        log: what its torchrun and ranks print.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address, self.namespace = NAMES[number], ADDRESSES[number], f"shardtensor-{NAMES[number]}"
        self.log = folder / f"{self.name}.log"
        self.torchrun: subprocess.Popen[bytes] | None = None

    def start(self, program: Path, *arguments: str, nodes: str = "2", options: tuple[str, ...] = ()) -> None:
        """The command that docs/clusters.md has users run on each host."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(RANKS)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "run-1", "--rdzv-endpoint", "first:29500", *options]
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        here = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", sys.executable, "-c", _NAMED, self.name]
        with self.log.open("w") as log:
            command = [*here, *torchrun, str(program), *arguments]
            self.torchrun = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def cut(self) -> None:
        """Pull the cable: what is sent is lost, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", "cable", "down")

    def end(self) -> None:
        """Kill all that runs here at once, as when a host ends: its connections are closed."""
        processes = _ip("netns", "pids", self.namespace, check=False).stdout.split()
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees another one end
            for process in processes:
                os.kill(int(process), signum)
        if self.torchrun is not None:
            self.torchrun.wait()

    def says(self) -> str:
        return self.log.read_text()


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other by their names; what they run is ended with the block."""
    first, second = hosts = (Host(0, folder), Host(1, folder))
    known = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    try:
        for host in hosts:
            names = Path("/etc/netns", host.namespace, "hosts")  # bound to /etc/hosts by ``ip netns exec``
            names.parent.mkdir(parents=True, exist_ok=True)
            names.write_text(known)
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        ends = ("cable", "type", "veth", "peer", "name", "cable", "netns", second.namespace)
        _ip("-n", first.namespace, "link", "add", *ends)
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "cable")
            _ip("-n", host.namespace, "link", "set", "cable", "up")
        yield hosts
    finally:
        for host in hosts:
            host.end()
            _ip("netns", "del", host.namespace, check=False)
            shutil.rmtree(Path("/etc/netns", host.namespace), ignore_errors=True)


def wait_until(happened, hosts, timeout: float = 240.0) -> float:
    """Wait for what ``happened()`` tells, and return for how many seconds; where it does not, what the hosts say."""
    start = time.monotonic()
    while not happened():
        assert time.monotonic() < start + timeout, "\n".join(f"{host.name}:\n{host.says()}" for host in hosts)
        time.sleep(0.05)
    return time.monotonic() - start

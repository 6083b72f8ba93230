"""The machines that ``advise`` knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .explain.report import Explanation


@dataclass(frozen=True)
class Machine:
    """The speed of ranks and links, from which :func:`shardtensor.advise` estimates times.

    A layer takes the time of its floating-point operations or of its memory traffic, whichever is longer, and the time
    of its communication. A message or collective takes ``latency``, and its bytes divided by ``bandwidth``. Nothing
    overlaps, and no rank waits for a slower one. So use the times to compare choices, not as predictions.

    Attributes:
        flops: floating-point operations per second of a rank.
        memory_bandwidth: bytes per second that a rank's operators read and write.
        latency: seconds of a message or collective.
        bandwidth: bytes per second of a rank's messages and collectives.
        name: the printed name.
    """

    flops: float = 67e12
    memory_bandwidth: float = 3.35e12
    latency: float = 20e-6
    bandwidth: float = 450e9
    name: str = "given"

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.flops / 1e12:.3g} TFLOP/s, memory {self.memory_bandwidth / 1e9:.4g} GB/s, "
            f"{1e6 * self.latency:.3g} us a message, {self.bandwidth / 1e9:.4g} GB/s between ranks)"
        )

    def seconds(self, found: Explanation, rank: int) -> float:
        """Return the time of a rank."""
        total = 0.0
        for share in (layer.shares[rank] for layer in found.layers):
            # Each result is read and written once, in backward its gradient and the operand's likewise.
            traffic = share.output_bytes * (6 if found.differentiated else 2)
            local = max(sum(share.flops) / self.flops, traffic / self.memory_bandwidth)
            total += local + (share.messages + share.collectives) * self.latency + share.bytes_sent / self.bandwidth
        return total


# float32 without tensor cores, memory, and NVLink in one direction, by NVIDIA's data sheets of the SXM modules.
# Latencies are round numbers, as is all of a CPU's core with gloo between processes.
MACHINES = {
    "h100": Machine(67e12, 3.35e12, 20e-6, 450e9, "h100"),
    "a100": Machine(19.5e12, 2.04e12, 20e-6, 300e9, "a100"),
    "cpu": Machine(1e11, 2e10, 300e-6, 4e9, "cpu"),
}

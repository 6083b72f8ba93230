"""A CUDA device for tests where there is none: torch's CPU kernels behind device type ``cuda``, NCCL's rules over gloo.

``device.emulated``, imported before torch in a process of its own, has torch find eight CUDA devices, or as many as
``CUDA_VISIBLE_DEVICES`` lists; ``device.build`` compiles what it needs, ``device.contracts`` says what CUDA's kernels
demand of their arguments. pytest's ``--device emulated`` runs the suite on it.

What it shows: mixtures of devices; host synchronizations and copies, each with its line; kernels of several streams
that are not ordered; results of communication, and host memory, that are used before they are there; calls that differ
between the ranks of a communicator; arguments that CUDA's kernels reject; memory that is read before it is written
(NaN). What it does not show: CUDA's and NCCL's speed and rounding, their bugs, and Triton.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

NAMES = ("cpu", "emulated", "cuda", "one-gpu", "one-gpu-nccl")


def on(name: str) -> AbstractContextManager[None]:
    """Inside the block, ranks of the pool compute on this device; the emulated one is compiled first.

    Raises:
        NotAvailable: there is no C++ compiler for the emulated one, or torch is built for CUDA.
    """
    from shardtensor.testing import on_device

    if name == "emulated":
        from .build import library

        library()
        return on_device("cuda", preload="device.emulated")
    if name in ("one-gpu", "one-gpu-nccl"):
        return on_device("cuda", preload="device.one_gpu" if name == "one-gpu" else "device.nccl_on_one_gpu")
    return on_device("cpu", preload="gloo_threads") if name == "cpu" else on_device(name)


def is_gpu(name: str) -> bool:
    """Whether kernels are CUDA's, which round in their own way, and report a failed assertion in their own words."""
    return name not in ("cpu", "emulated")


def asserted(name: str, text: str) -> str:
    """What an error says where values that ``text`` is about are looked at on the device."""
    return "device-side assert" if is_gpu(name) else text

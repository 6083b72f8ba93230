"""Importing this, before torch, makes a CPU-only torch believe in CUDA; see ``emulated.cpp`` for what its devices do.

A build without CUDA lacks the C functions of ``torch.cuda``, and replaces its classes of streams, events and graphs by
dummies. This module puts them in, in terms of torch's device-neutral ones. The rest of ``torch.cuda`` is torch's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from device.build import library

if "torch" in sys.modules:
    raise ImportError("import device.emulated before torch, which asks once whether there is a GPU")
_folder = Path(importlib.util.find_spec("torch").origin).parent / "lib"
for _name in (
    "libtorch_global_deps.so",
    "libc10.so",
    "libtorch_cpu.so",
    "libtorch.so",
    "libshm.so",
    "libtorch_python.so",
):
    if (_folder / _name).exists():
        ctypes.CDLL(str(_folder / _name), mode=ctypes.RTLD_GLOBAL)
_path = library()
ctypes.CDLL(str(_path), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402
from gloo_threads import OfOneDevice  # noqa: E402

_spec = importlib.util.spec_from_file_location("emulated_device", _path)
C = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(C)

cuda = torch.cuda


# ---- torch.cuda ------------------------------------------------------------------------------------------------------
class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **ids):
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("cuda", cuda._get_device_index(device, optional=True)))

    cuda_stream = property(lambda self: self.stream_id)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)


class CUDAGraph:
    def __init__(self, keep_graph=False):
        self.graph = C.Graph()

    def capture_begin(self, pool=None, capture_error_mode="global", **_):
        self.graph.begin()

    def capture_end(self):
        self.graph.end()

    def replay(self):
        self.graph.replay()

    def reset(self):
        self.graph.reset()

    def pool(self):
        return (0, 0)


def _exchange(index):
    before = C.current_device()
    if index >= 0:
        C.set_device(index)
    return before


def _set_device(index):
    cuda._lazy_init()
    C.set_device(index)


_CUDA_TYPE = 1
for _name, _function in {
    "_cuda_getDeviceCount": C.device_count,
    "_cuda_getDevice": C.current_device,
    "_cuda_init": lambda: None,
    "_cuda_setDevice": _set_device,
    "_cuda_getCurrentStream": lambda index: (C.current_stream(index), index, _CUDA_TYPE),
    "_cuda_getDefaultStream": lambda index: (0, index, _CUDA_TYPE),
    "_cuda_getCurrentRawStream": C.current_stream,
    "_cuda_setStream": lambda stream_id, device_index, device_type: C.set_stream(device_index, stream_id),
    "_cuda_synchronize": lambda: C.synchronize(C.current_device()),
    "_cuda_isCurrentStreamCapturing": C.capturing,
    "_cuda_isInBadFork": lambda: False,
    "_cuda_getArchFlags": lambda: "sm_90",
    "_cuda_getCompiledVersion": lambda: 12080,
    "_cuda_emptyCache": lambda: None,
    "_cuda_ipc_collect": lambda: None,
    "_cuda_sleep": lambda cycles: None,
    "_cuda_canDeviceAccessPeer": lambda a, b: True,
    "_host_emptyCache": lambda: None,
    "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
    "_show_config": lambda: "an emulated CUDA device",  # torch asks CUDA's libraries for their versions
    "_nccl_version": lambda: (2 << 32) + (27 << 16),
    "_nccl_version_suffix": lambda: b"",
    "_has_cuda": True,
    "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
    "_set_cached_tensors_enabled": lambda enabled: None,
}.items():
    setattr(torch._C, _name, _function)


class _Properties:
    name, major, minor, multi_processor_count, total_memory, warp_size = "emulated", 9, 0, 132, 80 << 30, 32
    regs_per_multiprocessor, max_threads_per_multi_processor, gcnArchName, L2_cache_size = 65536, 2048, "", 50 << 20


for _module in (cuda, cuda.streams, cuda.graphs):
    for _class in (Stream, Event, CUDAGraph):
        if hasattr(_module, _class.__name__):
            setattr(_module, _class.__name__, _class)
cuda._cudart = C  # there is one
cuda.default_generators = tuple(C.default_generator(i) for i in range(C.device_count()))
cuda._is_compiled = lambda: True
cuda._is_in_bad_fork = lambda: False
cuda._exchange_device, cuda._maybe_exchange_device = _exchange, lambda index: _exchange(index)  # two, as dynamo expects
cuda.device_count = C.device_count
cuda.get_device_properties = lambda device=None: _Properties
cuda.is_bf16_supported = lambda including_emulation=True: True
cuda.memory_allocated = lambda device=None: C.memory()[0]
cuda.max_memory_allocated = lambda device=None: C.memory()[1]
cuda.memory_reserved = cuda.memory_allocated
cuda.max_memory_reserved = cuda.max_memory_allocated
cuda.reset_peak_memory_stats = lambda device=None: C.reset_peak()
cuda.mem_get_info = lambda device=None: (_Properties.total_memory - C.memory()[0], _Properties.total_memory)
cuda.memory_stats = lambda device=None: Counter(
    {"allocated_bytes.all.current": C.memory()[0], "allocated_bytes.all.peak": C.memory()[1]}
)
cuda.empty_cache = lambda: None
for _name in ("memory_stats", "reset_peak_memory_stats", "empty_cache"):  # torch.accelerator's, which ask the allocator
    for _module in (torch.accelerator, torch.accelerator.memory):
        setattr(_module, _name, getattr(cuda, _name))
cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = C.capturing
cuda.graph_pool_handle = cuda.graphs.graph_pool_handle = lambda: (0, 0)

# Storages of a type of device that the build does not have are made by tensors.
_on_cpu = {name: getattr(torch.UntypedStorage, name) for name in ("clone", "to", "resize_")}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    return _bytes(self).clone().untyped_storage() if self.device.type == "cuda" else _on_cpu["clone"](self)


def _to(self: torch.UntypedStorage, *, device: torch.device, non_blocking: bool = False) -> torch.UntypedStorage:
    if torch.device(device).type != "cuda":
        return _on_cpu["to"](self, device=device, non_blocking=non_blocking)
    return _bytes(self).to(device, non_blocking=non_blocking).untyped_storage()


def _resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _on_cpu["resize_"](self, size)
    C.resize_storage(_bytes(self), size)
    return self


torch.UntypedStorage.resize_ = torch.no_grad()(_resize)
torch.UntypedStorage.clone = torch.storage._StorageBase.clone = torch.no_grad()(_clone)
torch.UntypedStorage.to = torch.storage._StorageBase.to = torch.no_grad()(_to)


# ---- kernels ---------------------------------------------------------------------------------------------------------
def _without_device_check() -> list[str]:
    """The operators whose kernels take numbers from the CPU besides tensors on the device."""
    functions = importlib.util.find_spec("torchgen").submodule_search_locations[0]
    text = Path(functions, "packaged/ATen/native/native_functions.yaml").read_text()
    entries = re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]
    return [f"aten::{entry.partition('(')[0]}" for entry in entries if "device_check: NoCheck" in entry]


C.set_unchecked(_without_device_check())

from device import attention, contracts, norms, recurrent  # noqa: E402  (which import torch)

attention.register()
norms.register()
recurrent.register()
C.set_contracts(sorted(contracts.NAMES), contracts.check)


def _mm_dtype(a, b, out_dtype):
    if out_dtype not in (a.dtype, torch.float32) or a.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    return a.to(out_dtype) @ b.to(out_dtype)


_kernels = torch.library.Library("aten", "IMPL")
for _product in ("mm", "bmm"):  # of half precision into float32: kernels that the CPU does not have
    _kernels.impl(f"{_product}.dtype", _mm_dtype, "CPU")
for _product in ("addmm", "baddbmm"):
    _kernels.impl(
        f"{_product}.dtype",
        lambda c, a, b, out_dtype, beta=1, alpha=1: beta * c.to(out_dtype) + alpha * _mm_dtype(a, b, out_dtype),
        "CPU",
    )


# ---- NCCL ------------------------------------------------------------------------------------------------------------
class _Backends(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, C.ProcessGroupNCCL)


class ProcessGroupNCCL(metaclass=_Backends):
    """Made by :mod:`torch.distributed` where a backend ``nccl`` is asked for."""

    Options = C.Options

    def __new__(cls, store, rank, size, options):
        gloo = OfOneDevice(dist.PrefixStore("emulated", store), rank, size, timeout=options._timeout)
        return C.ProcessGroupNCCL(gloo, options)


c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
c10d._NCCL_AVAILABLE = True
c10d.default_pg_nccl_timeout = c10d.default_pg_timeout
_init_process_group = dist.init_process_group


def _unbound(*args, device_id=None, **options):
    """Without a device to which the group is bound: torch would split the group, which NCCL alone can, for a mesh."""
    return _init_process_group(*args, **options)


c10d.init_process_group = dist.init_process_group = _unbound


# ---- counting --------------------------------------------------------------------------------------------------------
class Counted:
    """What happened on the device in a block of :func:`counted`.

    Attributes:
        events: how often, by kind (``"kernel"``, ``"sync"``, ``"h2d"``, ``"d2h"``, ``"mix"``, ``"nccl"``,
            ``"message"``, ``"message alone"``, ``"polled"``, ``"unwaited"``) and name.
        lines: how often, by kind, name, and the lines of the package, innermost first, that it came from.
        bytes: read and written by kernels.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], int] = {}
        self.lines: Counter[tuple[str, str, str]] = Counter()
        self.bytes = 0

    def total(self, kind: str) -> int:
        return sum(n for (k, _), n in self.events.items() if k == kind)

    def of(self, *kinds: str) -> str:
        """A line for each event of these kinds, for messages."""
        return "\n".join(
            f"{n} x {kind} {name} at {where}" for (kind, name, where), n in self.lines.items() if kind in kinds
        )


_lock = threading.Lock()


def _lines_of_package(most: int = 3) -> str:
    found = []
    for frame in reversed(traceback.extract_stack()):
        _, separator, file = frame.filename.partition("/shardtensor/")
        if separator and not file.startswith("testing/"):
            found.append(f"{file}:{frame.lineno}")
    return " < ".join(found[:most])


@contextlib.contextmanager
def counted(watch: tuple[str, ...] = ("sync", "h2d", "d2h", "mix", "message alone", "unwaited")) -> Iterator[Counted]:
    """Count what happens on this process's devices; of the kinds to watch, where in the package it comes from."""
    result = Counted()

    def seen(kind: str, name: str) -> None:
        with _lock:
            result.lines[kind, name, _lines_of_package()] += 1

    C.take_counts(), C.take_moved_bytes()
    C.watch(list(watch), seen)
    C.count(True)
    try:
        yield result
    finally:
        C.count(False)
        C.watch([], None)
        result.events, result.bytes = C.take_counts(), C.take_moved_bytes()


def after_call() -> None:
    """Raise what was found where nothing could be raised: memory freed, or host memory written to, too early."""
    if races := C.take_races():
        raise RuntimeError("races on the emulated device:\n" + "\n".join(races))


__all__ = ["Counted", "ProcessGroupNCCL", "after_call", "counted"]

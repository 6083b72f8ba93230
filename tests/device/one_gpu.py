"""Importing this makes all ranks share one GPU: they compute on it, and communicate through the host, by gloo.

The kernels and the streams are CUDA's, and every rank has a CUDA context of its own. Communication is not NCCL's: what
is sent is copied to the host, for which the host waits, and results are copied to the device in ``wait()``, in front of
what the stream that waits does next. NCCL itself can be had with ``device.nccl_on_one_gpu``.
"""

from __future__ import annotations

import os
from collections import deque

os.environ["LOCAL_RANK"] = "0"

import gloo_threads  # noqa: F401
import torch
import torch.distributed as dist
from late import c10d_operators

from shardtensor._compat import hidden_from_program, tree_leaves, tree_map

dist.Backend.default_device_backend_map["cuda"] = "gloo"


class StagedWork(dist.Work):
    """An operation on copies that the host has of tensors on the device."""

    def __init__(self, works, copies) -> None:
        super().__init__()
        self._works, self._copies = works, copies

    def wait(self, timeout=None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        with hidden_from_program():
            for tensor, copy in self._copies:
                tensor.data.copy_(copy)
        self._copies = []
        open_works.discard(self)
        waited.append(self)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self):
        return None

    def result(self):
        return [tensor for tensor, _ in self._copies]

    def source_rank(self) -> int:
        return self._works[0]._source_rank()

    _source_rank = source_rank

    def get_future(self):
        tensors = self.result()
        self.wait()
        future = torch.futures.Future(devices=[torch.device("cuda", 0)])
        future.set_result(tensors)
        return future


open_works: set[StagedWork] = set()  # C++ alone may hold a work until it is waited for,
waited: deque[StagedWork] = deque(maxlen=64)  # and wait once more, which without its Python part would never end


def _kernel(name: str):
    operator = getattr(torch.ops.c10d, name).default
    returns_tensors = len(operator._schema.returns) > 1
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def run(*args):
        if all(t.device.type == "cpu" for t in tree_leaves(args) if isinstance(t, torch.Tensor)):
            return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def on_host(a):
            if not isinstance(a, torch.Tensor) or a.device.type != "cuda":
                return a
            if id(a) not in copies:
                copies[id(a)] = (a, a.to("cpu").contiguous())  # tests count calls of cpu()
            return copies[id(a)][1]

        with hidden_from_program():
            made = operator.redispatch(keys, *tree_map(on_host, list(args)))
        works = [w for w in (made if isinstance(made, tuple) else (made,)) if isinstance(w, torch.ScriptObject)]
        sent = name == "send"
        written = [] if sent else tree_leaves(args[0])
        work = StagedWork([dist.Work.unbox(w) for w in works], [copies[id(t)] for t in written if id(t) in copies])
        if not works:
            work.wait()
            return made
        open_works.add(work)
        return (args[0], work.boxed()) if returns_tensors else work.boxed()

    return run


_library = torch.library.Library("c10d", "IMPL")
for _name in c10d_operators():
    _library.impl(_name, _kernel(_name), "BackendSelect")
# A preview puts kernels of its own in front of these, which torch refuses where Python has some.
torch.library._impls.difference_update(_library._op_impls)

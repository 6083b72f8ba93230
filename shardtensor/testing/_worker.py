"""One rank of a pool: the program that :mod:`shardtensor.testing.pool` starts, by path and not by module name.

It imports torch and nothing of shardtensor, so that a pool is ready as soon as possible; the functions that are sent to
it import what they need. It exits by ``os._exit`` only: gloo's threads sometimes abort the interpreter's normal exit,
after correct results.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import queue
import random
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


def listen(connection: Connection, requests: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Pass requests to the main thread, and exit when the parent has ended, whatever the main thread is doing."""
    folder = os.path.dirname(sys.argv[6])
    try:
        while True:
            requests.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)  # which a killed parent has not done
        os._exit(0)


def fresh_state(device: Any) -> None:
    """Undo what an earlier call may have left behind, and seed."""
    import torch

    torch.set_num_threads(1)
    if device.type != "cpu":
        torch.set_default_device(device)
        torch.get_device_module(device).set_device(device)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    if data_parallel := sys.modules.get("shardtensor._compat.data_parallel"):
        data_parallel.forget_fully_sharded()
    if history := sys.modules.get("shardtensor.ranks.history"):  # in which ranks may have differed on purpose
        history.forget_history()
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def call(device: Any, after: Callable[[], None] | None, path: list[str], payload: bytes) -> tuple[str, object]:
    """Run one pickled ``(fn, args, kwargs)``: ``("returned", pickled result)`` or ``("raised", description)``.

    The parent has no device: tensors and modules among the arguments are moved to this rank's, tensors of the result to
    the CPU.
    """
    try:
        sys.path[:] = path
        fn, args, kwargs = pickle.loads(payload)
        fresh_state(device)
        if device.type == "cpu":
            result = fn(*args, **kwargs)
        else:
            args, kwargs = moved((args, kwargs), device)
            result = moved(fn(*args, **kwargs), "cpu")
        if after is not None:
            after()
        try:
            return "returned", pickle.dumps(result)
        except Exception as error:
            raise TypeError(f"the result, a {type(result).__name__}, cannot be pickled: {error}") from error
    except BaseException as error:
        described = describe(error)
        if after is not None:
            traceback.clear_frames(error.__traceback__)
            with contextlib.suppress(Exception):  # what it finds is of this call, which has failed already
                after()
        return "raised", described


def moved(tree: Any, device: Any) -> Any:
    """``tree``, of tuples, lists and dicts, with its modules and plain tensors on ``device``."""
    import torch

    if type(tree) in (tuple, list):
        return type(tree)(moved(value, device) for value in tree)
    if type(tree) is dict:
        return {key: moved(value, device) for key, value in tree.items()}
    return tree.to(device) if type(tree) is torch.Tensor or isinstance(tree, torch.nn.Module) else tree


def describe(error: BaseException) -> dict[str, object]:
    """What the parent needs to know of ``error``; ``"pickled"`` is None where it cannot be pickled and unpickled."""
    # The first frame is in this file and of no interest to the reader.
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return {"type": type(error).__qualname__, "text": str(error), "traceback": text, "pickled": pickled}


def check(device: Any, seconds: float) -> tuple[str, object]:
    """Whether the pool can be kept after a call that failed: in every group, the ranks' next collectives must meet."""
    import torch
    import torch.distributed as dist

    try:
        limit = timedelta(seconds=seconds)
        world = dist.group.WORLD
        assert world is not None
        world.monitored_barrier(timeout=limit)  # type: ignore[attr-defined]
        if device.type != "cpu":
            dist.all_reduce(torch.zeros(1, device=device))
            torch.accelerator.synchronize()
        meshes = sys.modules.get("shardtensor.testing.mesh")
        cached = meshes.cached_meshes() if meshes else {}
        names: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(names, list(cached))
        if any(other != names[0] for other in names):
            return "unhealthy", f"ranks have different meshes: {names}"
        for mesh in cached.values():
            if mesh.get_coordinate() is not None:
                for group in mesh.get_all_groups():
                    group.monitored_barrier(timeout=limit)
                    if device.type != "cpu":
                        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return "healthy", None
    except BaseException as error:
        return "unhealthy", str(error)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    rank, world_size, port = (int(argument) for argument in sys.argv[2:5])
    collective_timeout, stacks_path = float(sys.argv[5]), sys.argv[6]
    os.set_inheritable(connection.fileno(), False)
    # Ctrl-C is for the parent, which then closes the pipes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks = open(stacks_path, "a")  # noqa: SIM115  (faulthandler keeps it for the life of the process)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(connection, requests), daemon=True).start()

    device_type, preload = sys.argv[7:9]
    try:
        after = None
        if preload:
            sys.path[:] = json.loads(sys.argv[9])
            after = getattr(importlib.import_module(preload), "after_call", None)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        device, backend = torch.device("cpu"), "gloo"
        if device_type != "cpu":
            device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))  # which a preload may have changed
            backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device)}"
        limit = timedelta(seconds=collective_timeout)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, world_size, is_master=False, timeout=limit
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    except BaseException as error:
        connection.send(("raised", describe(error)))
        os._exit(1)
    connection.send(("ready", None))

    while True:
        kind, *rest = requests.get()
        reply = call(device, after, *rest) if kind == "call" else check(device, *rest)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(reply)


if __name__ == "__main__":
    main()

"""A step as a CUDA graph, which is replayed without the host; on devices without graphs it runs as it is.

[Note: captured steps] A graph repeats kernels, on the same memory. It leaves out all that the host did meanwhile: also
what connects ranks, compares what they do, makes plans and their tables. So the first calls are ordinary steps, on real
data, on the stream that is captured later. Nothing has to be undone, and what happens once has happened. From then on a
call copies its arguments to where the graph reads them, replays, and copies the results, which the next replay
overwrites. The graph holds addresses only, so this module keeps alive whatever the graph reads: arguments, gradients,
plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._compat import keystr, tree_flatten, tree_map, tree_map_with_path
from .._compat.c10d import backend_of, device_of, group_along, process_group
from ..dispatch.planning import kept_plans
from ..dispatch.tensor import ShardTensor, wrap
from ..layout.caches import forgets
from ..ranks.cuda_graphs import module_with_graphs
from ..ranks.history import counts, record
from ..ranks.integer_rows import gather_rows, gather_texts

P = ParamSpec("P")
R = TypeVar("R")

_captures: Counter[str] = Counter()  # of steps, by a group in which they communicate
forgets(_captures.clear)


def capture(step: Callable[P, R], *, warmup: int = 11) -> Callable[P, R]:
    """Return a function that repeats ``step`` as a CUDA graph after its first calls. On a CPU it always runs ``step``.

    A graph leaves out the host, which limits steps on small shards. The first ``warmup`` calls run ``step`` itself, on
    a stream of their own. The next one captures it on all ranks, with its communication. From then on a call copies
    its arguments into the graph's, replays the graph, and returns copies of the results.

    Args:
        step: a forward pass, or a whole training step. Its arguments are tensors that require no gradients, also
            ShardTensors, and lists, tuples and dicts of them. All else that it uses (numbers, flags of modules,
            ``autocast``) stays as it was when captured.
        warmup: how many calls run ``step`` itself. DistributedDataParallel needs 11.

    Returns:
        A function with the arguments and results of ``step``. Results are detached: call ``backward()`` in the step.
        ``zero_grad()`` and ``optimizer.step()`` may be in the step or outside. Optimizers in it become ``capturable``.

    Raises:
        ValueError: in a call, an argument that requires a gradient, or is on another device; on GPUs, one of another
            layout, shape, dtype or value than before (of tensors the values may change); a number of an optimizer, such
            as ``lr``, that has changed.
        TypeError: in a call, no argument is a tensor.
        RuntimeError: in the call that captures, the step cannot be in a graph, because it reads values or draws random
            numbers on the host, because of its optimizer, or because the ranks communicate by gloo. All ranks raise.

    Example::

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        step = capture(step)
        for x, y in loader:
            loss = step(x, y)
    """
    if warmup < 1:
        raise ValueError(f"capture: warmup is {warmup}, but the first call connects the ranks, so at least 1 is needed")
    return _Captured(step, warmup)


class _Captured(Generic[P, R]):
    """What :func:`capture` returns: a step, and its graph once there is one."""

    def __init__(self, step: Callable[P, R], warmup: int) -> None:
        self._step, self._left = step, warmup
        self._arguments: list[Any] = []  # which the graph reads
        self._graph: Any = None
        self._modules: dict[nn.Module, None] = {}
        self._optimizers: dict[Optimizer, None] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = tree_flatten((args, kwargs))
        if not self._arguments:
            if not _on_gpu(leaves):
                return tree_map(_detached, self._step(*args, **kwargs))  # type: ignore[no-any-return]
            self._arguments = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
            self._tree, self._keys = tree, [*map(_key, leaves)]
            self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if [*map(_key, leaves)] != self._keys or tree != self._tree:
            raise _another(self._tree.unflatten(self._arguments), (args, kwargs))
        if self._left:
            return self._warm_up(leaves)
        if self._graph is None:
            self._capture(leaves)
        self._check_numbers()
        return self._replay(leaves)

    def _run(self) -> Any:
        args, kwargs = self._tree.unflatten(self._arguments)
        return tree_map(_detached, self._step(*args, **kwargs))

    @torch.no_grad()
    def _copy_in(self, leaves: list[Any]) -> None:
        # As the program writes to ShardTensors: what was found of the values before must not be in the graph.
        for kept, x in zip(self._arguments, leaves, strict=True):
            if isinstance(x, Tensor):
                kept.copy_(x)

    def _warm_up(self, leaves: list[Any]) -> R:
        self._copy_in(leaves)
        self._left -= 1
        hooks = [register_optimizer_step_pre_hook(self._make_capturable)]
        if not self._left:
            hooks.append(register_module_forward_pre_hook(lambda module, _: self._modules.update({module: None})))
        before, current = counts(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                results = self._run()
        finally:
            for hook in hooks:
                hook.remove()
        current.wait_stream(self._stream)
        weights = dict.fromkeys(p for module in self._modules for p in module.parameters(recurse=False))
        self._weights = [p for p in weights if p.grad is not None]
        meshes = dict.fromkeys(x.device_mesh for x in leaves if isinstance(x, DTensor))
        along = [group_along(mesh, m).group_name for mesh in meshes for m in range(mesh.ndim) if mesh.size(m) > 1]
        used = [name for name, n in counts().items() if n != before.get(name)]
        self._groups = [*dict.fromkeys(along + used)]
        return tree_map(_copy, results)  # type: ignore[no-any-return]

    def _make_capturable(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizers[optimizer] = None
        for group in optimizer.param_groups:
            if not group.get("capturable", True):
                group["capturable"] = True
                for p in group["params"]:
                    if p in optimizer.state:
                        optimizer.state[p]["step"] = optimizer.state[p]["step"].to(p.device)

    def _capture(self, leaves: list[Any]) -> None:
        groups = [group for group in map(process_group, self._groups) if device_of(group)]  # those that are no fakes
        _check_backends(groups, self._stream.device)
        for optimizer in self._optimizers:
            _check_state(optimizer)
        for name in self._groups:  # new to the history, so the ranks compare what they have done, and plain values
            _captures[name] += 1
            record(name, f"capture {_captures[name]} of a step", torch.int64, 1)
        self._copy_in(leaves)
        for p in self._weights:  # or the graph would not add to gradients of an earlier batch
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        graph, said, cause = torch.cuda.CUDAGraph(), "", None
        try:
            # Other threads may go on, such as a loader's. The outer block: where capturing fails, torch leaves its own
            # stream current.
            with torch.cuda.stream(self._stream), torch.cuda.graph(graph, None, self._stream, "thread_local"):
                self._results = self._run()
        except Exception as error:
            cause = error.__context__ or error  # rather than what ending a broken capture raises
            said = f"rank {dist.get_rank() if groups else 0}: {str(cause).splitlines()[0]}"
        for group in groups:
            told = gather_texts(said, partial(gather_rows, group=group, device=self._stream.device))
            said = next(filter(None, told.values()), "")
        try:
            if said:
                raise RuntimeError(
                    f"capture: a CUDA graph cannot contain this step ({said}). A graph repeats kernels, and nothing "
                    "that the host does: read, print, decide and draw outside of the step"
                ) from cause
        finally:  # or its frames would stay with this one: torch's printing has one that keeps functorch off
            del cause
        self._graph, self._plans = graph, kept_plans()
        self._gradients: list[tuple[Tensor, Any]] = [(p, p.grad) for p in self._weights]
        self._fixed = {optimizer: [*map(_numbers, optimizer.param_groups)] for optimizer in self._optimizers}

    def _check_numbers(self) -> None:
        for optimizer, fixed in self._fixed.items():
            for group, numbers in zip(optimizer.param_groups, fixed, strict=True):
                for key, was in numbers.items():
                    if group[key] != was:
                        name = type(optimizer).__name__
                        raise ValueError(
                            f"capture: {key} of {name} is {float(group[key])}, but was {was} when the step was "
                            "captured, and a CUDA graph repeats that. Make it a tensor on the GPU, to which schedulers "
                            f"write: {name}(..., {key}=torch.tensor({was}, device={self._stream.device.type!r}))"
                        )

    @torch.no_grad()
    def _replay(self, leaves: list[Any]) -> R:
        for kept, x in zip(self._arguments, leaves, strict=True):
            if isinstance(x, DTensor):
                kept._local_tensor.copy_(x._local_tensor)
            elif isinstance(x, Tensor):
                kept.copy_(x)
        for p, gradient in self._gradients:
            if p.grad is not gradient:  # reset by the program, or replaced
                gradient.zero_() if p.grad is None else gradient.copy_(p.grad)
                p.grad = gradient
        self._graph.replay()
        return tree_map(_copy, self._results)  # type: ignore[no-any-return]


def _detached(x: Any) -> Any:
    # Without its graph, which would keep the accumulators of gradients, and the stream that these were made on.
    return x.detach() if isinstance(x, Tensor) else x


def _copy(x: Any) -> Any:
    if isinstance(x, ShardTensor):
        return wrap(x._local_tensor.clone(), x._spec)
    return x.clone() if isinstance(x, Tensor) else x


def _key(x: Any) -> Any:
    """What a graph depends on, besides the values of tensors."""
    if isinstance(x, DTensor):
        return x._spec, x.requires_grad
    return (x.dtype, x.shape, x.device, x.requires_grad) if isinstance(x, Tensor) else (type(x), x)


# -- errors, on every rank alike --------------------------------------------------------------------------------------


def _on_gpu(leaves: list[Any]) -> bool:
    """Whether a step with these arguments can be captured; an error where its graph would be wrong."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors:
        raise TypeError("capture: no argument of the step is a tensor, so a graph could not get new values")
    if any(x.requires_grad for x in tensors):
        raise ValueError(
            "capture: an argument of the step requires a gradient, which would stay in the graph. Compute it in the "
            "step, and return it: x = x.detach().requires_grad_(); ...; return torch.autograd.grad(loss, x)"
        )
    kinds = {x.device.type for x in tensors}
    has_graphs = any(module_with_graphs(kind) is not None for kind in kinds)
    if has_graphs and len(kinds) > 1:
        raise ValueError(
            f"capture: the arguments of the step are on {' and '.join(sorted(kinds))}, and a graph reads the GPU's "
            "memory alone. Move them to the GPU before the call: x.to(device)"
        )
    return has_graphs


def _another(before: tuple[Any, Any], now: tuple[Any, Any]) -> ValueError:
    was, found = _texts(*before), _texts(*now)
    at = next(at for at in {**was, **found} if was.get(at) != found.get(at))
    return ValueError(
        f"capture: argument {at} is {found.get(at, 'absent')}, but was {was.get(at, 'absent')} in the first call, and "
        "a CUDA graph repeats that. Call the step itself for it, or capture the step once more for such arguments"
    )


def _texts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Each argument in words, by its place."""
    found = {}

    def note(path: Any, x: Any) -> None:
        text = repr(x)
        if isinstance(x, Tensor):
            layout = x._spec if isinstance(x, DTensor) else tuple(x.shape)
            text = f"{layout}, {x.dtype}, on {x.device}" + (", which requires a gradient" if x.requires_grad else "")
        found[keystr(path)] = text

    tree_map_with_path(note, {**dict(enumerate(args)), **kwargs})
    return found


def _check_backends(groups: list[dist.ProcessGroup], device: torch.device) -> None:
    for backend in (backend_of(group, device) for group in groups):
        if backend in ("gloo", "mpi", "ucc"):
            raise RuntimeError(
                f"capture: the ranks communicate by {backend}, through the host, which a CUDA graph leaves out. "
                "Initialize the process group with NCCL: init_process_group('cpu:gloo,cuda:nccl')"
            )


def _check_state(optimizer: Optimizer) -> None:
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.device != p.device):
                raise RuntimeError(
                    f"capture: {type(optimizer).__name__} keeps {key!r} on the host, where a CUDA graph would not "
                    "change it. Take an optimizer that is capturable, such as AdamW, or call optimizer.step() after "
                    "the step"
                )


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """What a graph repeats of an optimizer's group."""
    on_host = {k: v for k, v in group.items() if isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.is_cpu)}
    return {k: float(v) for k, v in on_host.items()}

"""All that this package replaces in torch and in the process: one list, and the function that does so.

[Note: footprint] ``import shardtensor`` must not change a program, or a part of one, that has no ShardTensor. So every
replacement hands on the calls that are not for this package, and a replacement that can wait is made for the process's
first ShardTensor. A call of torch's function that began before that goes on as torch's. A first ShardTensor that is
made inside of such a call is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, reduce
from threading import RLock
from types import FrameType
from typing import Any, NamedTuple

import torch
import wrapt
from torch.utils.checkpoint import CheckpointFunction

AT_IMPORT = "import"
AT_FIRST = "the first ShardTensor"
AT_COMMUNICATION = "the first communication"


class Replacement(NamedTuple):
    """What is replaced, or added to.

    Attributes:
        names: ``module:attribute``, where not all versions of torch have each.
        when: with what; in a module that is imported later, then.
        why: the reason.
        otherwise: what it does where nothing is sharded.
    """

    names: tuple[str, ...]
    when: str
    why: str
    otherwise: str


_ONE = "one function of this package, which calls torch's"
REPLACED = (
    Replacement(
        (
            *(f"torch.nn.functional:{name}" for name in ("conv1d", "conv2d", "conv3d", "linear", "l1_loss")),
            "torch.nn:SyncBatchNorm.forward",
        ),
        AT_IMPORT,
        "calls that torch does not dispatch: from composites that run with torch functions disabled",
        _ONE,
    ),
    Replacement(
        ("torch:to_dlpack", "torch.utils.dlpack:to_dlpack"),
        AT_IMPORT,
        "a ShardTensor has no memory whose address could be given away",
        _ONE,
    ),
    Replacement(
        (
            *("natten.functional:neighborhood_attention_generic", "natten.modules:neighborhood_attention_generic"),
            *("natten.functional:attention", "natten.functional:merge_attentions"),
            *("natten:attention", "natten:merge_attentions", "opt_einsum.contract:infer_backend"),
        ),
        AT_IMPORT,
        "libraries that dispatch on nothing",
        "one function of this package, which calls the library's",
    ),
    Replacement(
        ("torch.jit._builtins:_builtin_table",),
        AT_IMPORT,
        "`torch.jit.script` compiles a replaced function as the builtin that it was",
        "entries for these functions",
    ),
    Replacement(
        ("torch.distributed._composable_state:_module_state_mapping",),
        AT_IMPORT,
        "remembers whether FSDP2 was applied, also after its modules have gone",
        "one function of this package where FSDP2 is applied to a module",
    ),
    Replacement(
        ("torch._weights_only_unpickler:_marked_safe_globals_set",),
        AT_IMPORT,
        "`torch.load(weights_only=True)` builds ShardTensors",
        "four more entries",
    ),
    Replacement(
        ("torch.library:_defs", "torch.library:_impls", "torch.ops:shardtensor"),
        AT_IMPORT,
        "communication in graphs: operators of the namespace `shardtensor`",
        "nothing",
    ),
    Replacement(
        ("torch._dynamo.trace_rules:SKIP_DIRS", "torch._dynamo.trace_rules:SKIP_DIRS_RE"),
        AT_IMPORT,
        "torch.compile does not compile functions of this package that run outside of graphs",
        "nothing",
    ),
    Replacement(
        ("sys:meta_path",),
        AT_IMPORT,
        "wrapt's finder, by which modules that are imported later are changed then",
        "looks at the names of modules that are imported",
    ),
    Replacement(
        ("atexit:register", "os:register_at_fork"),
        AT_IMPORT,
        "process groups are let go before the interpreter ends; a forked process does not speak for its rank",
        "nothing",
    ),
    Replacement(
        ("torch._C:_stash_obj_in_tls",),
        AT_IMPORT,
        "in autograd's threads a backward pass has the settings of the thread that has called it",
        "one object that torch keeps for the thread",
    ),
    Replacement(
        # Before torch 2.14 the first one is Python's, and calls the second.
        ("torch.autograd.function:Function.apply", "torch.autograd.function:_SingleLevelFunction.apply"),
        AT_FIRST,
        "a program's own function returns gradients of plain weights that are complete, and plain",
        _ONE,
    ),
    Replacement(
        (
            *("torch._functorch.eager_transforms:_vjp_with_argnums", "torch._functorch.apis:vmap_impl"),
            *("torch._functorch.eager_transforms:_jvp_with_argnums",),
            *("torch._functorch.eager_transforms:grad_and_value_impl",),
            *("torch._functorch.eager_transforms:safe_unpack_dual",),
        ),
        AT_FIRST,
        "`torch.func` of functions that meet ShardTensors",
        "torch's goes first. The outermost transform copies the states of the random number generators before, outside "
        "of captured graphs, once there is a process group",
    ),
    Replacement(
        ("torch.distributed.tensor:DTensor.from_local",),
        AT_FIRST,
        "local results of uneven shards get the sizes that these have, in `local_map` and in the styles of torch",
        _ONE,
    ),
    Replacement(
        ("torch.autograd.graph:_get_tid",),
        AT_FIRST,
        "`allow_mutation_on_saved_tensors` tells ShardTensors apart, which have no address",
        "the same, and a number of the tensor: torch's takes a new tensor for one that has gone at times",
    ),
    Replacement(
        ("torch._dynamo.trace_rules:get_torch_obj_rule_map",),
        AT_FIRST,
        "torch.compile sees torch's functions in place of those of `torch.func`",
        "the same rules",
    ),
    Replacement(
        ("torch._library.simple_registry:GenericTorchDispatchRuleHolder.find",),
        AT_FIRST,
        "torch 2.11 and 2.12: operators on ShardTensors reach them, and not DTensor",
        _ONE,
    ),
    Replacement(
        ("torch._inductor.lowering:lowerings",),
        AT_FIRST,
        "before torch 2.15: operators with ordered effects keep their order",
        "the same for other packages' operators of this kind",
    ),
    Replacement(
        ("torch._inductor.graph:GraphLowering.codegen",),
        AT_FIRST,
        "no CUDA graphs of graphs that communicate",
        _ONE,
    ),
    Replacement(
        ("sys:excepthook", "std:set_terminate"),
        AT_COMMUNICATION,
        "a rank that ends tells the others why",
        "what was there before is called",
    ),
    Replacement(
        ("torch.ops:c10d",),
        "a preview, a timeline or a count of communication, while it runs",
        "sees collectives; a preview calls none",
        "sees them, too",
    ),
    Replacement(
        ("warnings:filters",),
        "a sharded value that a program's own function writes to a plain argument",
        "torch warns that this argument was none",
        "one filter more, of this warning",
    ),
)
_WHEN = {name: entry.when for entry in REPLACED for name in entry.names}

# What is to be replaced with the first ShardTensor.
waiting: list[Callable[[], None]] = []
_lock = RLock()


def replace(name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(what is there)`` in the place of what has this name in the list, when the list says."""
    if _WHEN[name] == AT_FIRST:
        waiting.append(partial(when_imported, name, lambda module: put(name, make)))
    else:
        when_imported(name, lambda module: put(name, make))


def put(name: str, make: Callable[[Any], Any]) -> None:
    """The same now."""
    assert name in _WHEN, f"{name} is not in the list"
    owner, attribute = find(name)
    setattr(owner, attribute, make(getattr(owner, attribute)))


def when_imported(name: str, call: Callable[[Any], None]) -> None:
    """Call this with the module of a name in the list, once it is imported."""
    assert name in _WHEN, f"{name} is not in the list"
    wrapt.register_post_import_hook(call, name.partition(":")[0])


def find(name: str) -> tuple[Any, str]:
    """Where what has this name is: the module or class, and the name in it."""
    module, _, path = name.partition(":")
    *path_to, attribute = path.split(".")
    return reduce(getattr, path_to, sys.modules.get(module)), attribute


def begin() -> None:
    """Replace what has waited for it: a ShardTensor is about to be made."""
    with _lock:
        if waiting and _too_late():
            raise RuntimeError(
                "the first ShardTensor of a process is made in the forward of an autograd.Function, or in a transform "
                "of torch.func, which has begun without it: its gradients would not be completed. Make a ShardTensor "
                "before that, for example one of its inputs"
            )
        while waiting:
            waiting.pop(0)()


def _too_late() -> bool:
    """Whether C++ calls the forward of a function. There it takes no tangents, as in inference mode."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # reentrant checkpointing is such a function, and runs all inside without gradients
        if frame.f_code is CheckpointFunction.forward.__code__:
            return False
        frame = frame.f_back
    return True

"""The units of FSDP2: which parameters are gathered, and their gradients reduced, together.

torch reduces the gradients of a unit in one buffer, so its trained parameters have one dtype. Networks have several:
complex spectral weights next to real ones, norms in float32 next to layers in bfloat16. So here each parameter is in
the innermost unit around it of its dtype. The units are the model and the modules that the program has named.
Parameters of a dtype that no unit around them has are in further units: the outermost modules around them that have a
forward of their own. Whether an inner module is called is not known: a program may use its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# Programs take the modules out of these and call each.
_OF_CONTAINERS = nn.Module.forward, nn.Sequential.forward
# The parameters of each unit, from the outside in.
Units = dict[nn.Module, list[nn.Parameter]]


def shard_by_units(
    model: nn.Module, classes: Sequence[type[nn.Module]], mesh: DeviceMesh, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Apply ``fully_shard`` to the model and its modules of these classes; a line about their dtypes, if these differ.

    Args:
        options: for ``fully_shard``.

    Raises:
        ValueError: no units of one dtype can be made.
    """
    names = {module: name or "the model" for name, module in model.named_modules()}
    shown: dict[torch.dtype, list[str]] = {}
    for module, parameters in _units(model, tuple(classes), options.get("ignored_params") or ()).items():
        own: dict[str, Any] = {}
        dtype = next((p.dtype for p in parameters if p.requires_grad), None)
        if dtype is not None:
            shown.setdefault(dtype, []).append(names[module])
        if others := set(module.parameters()).difference(parameters):
            own["ignored_params"] = others
        policy = options.get("mp_policy", MixedPrecisionPolicy())
        if dtype is not None and dtype.is_complex:  # torch puts complex gradients into no real buffer
            own["mp_policy"] = policy = replace(policy, param_dtype=None, reduce_dtype=None)
        if module is not model and not isinstance(module, tuple(classes)):  # of the model, but for its dtype
            own["mp_policy"] = replace(policy, cast_forward_inputs=False, output_dtype=None)
            own["reshard_after_forward"] = options.get("reshard_after_forward") or False
        # The outer ones come first: torch leaves all that is in an inner one out of an outer one.
        fully_shard(module, mesh=mesh, **{**options, **own})
    units = (f"{str(dtype).removeprefix('torch.')}: {', '.join(where)}" for dtype, where in shown.items())
    return (f"FSDP2's units have one dtype each: {'; '.join(units)}",) if len(shown) > 1 else ()


def _units(model: nn.Module, classes: tuple[type[nn.Module], ...], ignored: Collection[nn.Parameter]) -> Units:
    """The units of a model: each trained parameter is in the innermost one around it of its dtype."""
    left: dict[nn.Parameter, set[nn.Module]] = {}  # the parameters without a unit, and the modules that hold each
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in ignored:
                left.setdefault(parameter, set()).add(module)
    named = [m for m in model.modules() if m is not model and isinstance(m, classes)]
    called = {m: set(m.modules()) for m in model.modules() if type(m).forward not in _OF_CONTAINERS}
    units = Units()

    def within(modules: set[nn.Module]) -> list[nn.Parameter]:
        return [p for p, holding in left.items() if holding <= modules]

    def add(module: nn.Module, candidates: list[nn.Parameter]) -> None:
        trained = [p for p in candidates if p.requires_grad]
        if module not in named and len({p.dtype for p in trained}) > 1:
            inner = [within(modules) for m, modules in called.items() if m is not module and m not in units]
            only_here = set(trained).difference(*inner)
            if len({p.dtype for p in only_here}) > 1:
                raise ValueError(_refusal(model, module, only_here))
            trained = list(only_here) or trained
        sizes: Counter[torch.dtype] = Counter()
        for p in trained:
            sizes[p.dtype] += p.numel()
        # The model's unit casts what it takes to the policy's dtype, which one of complex parameters has not.
        dtype = max(sizes, key=lambda d: (module in named or not d.is_complex, sizes[d]), default=None)
        units[module] = [p for p in candidates if p.dtype == dtype or not p.requires_grad]
        for p in units[module]:
            del left[p]

    for module in reversed(named):
        add(module, within(set(module.modules())))
    add(model, list(left))
    for module, modules in called.items():
        if module not in units and (candidates := within(modules)):
            add(module, candidates)
    return {module: units[module] for module in model.modules() if module in units}


def _refusal(model: nn.Module, module: nn.Module, parameters: Collection[nn.Parameter]) -> str:
    name = next((f"{name} " for name, m in model.named_modules() if m is module and name), "")
    held = [f"{n} ({str(p.dtype).removeprefix('torch.')})" for n, p in model.named_parameters() if p in parameters]
    return (
        f"{name}{type(module).__name__} has parameters of several dtypes that are in no inner module with a forward: "
        f"{', '.join(held)}. Those of a unit of FSDP2 have one dtype. Put the parameters of one dtype into a module of "
        "their own that is called; hold complex ones as real (torch.view_as_real, and torch.view_as_complex in "
        "forward); or pass fsdp=() and wrap the model in DistributedDataParallel"
    )

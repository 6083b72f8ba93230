"""``shardtensor``, or ``python -m shardtensor``: look at what a model would do on shards, without a cluster.

python -m shardtensor explain models:unet --input 1x3x1350x2700 --mesh 4 --shard 2
"""

from __future__ import annotations

import argparse
import importlib
import json
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import shardtensor

from .observe.command_line import MACHINE_OPTIONS, parser
from .observe.explain import Choice, UnfitArguments
from .observe.machines import MACHINES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, 1 where something is refused, or 2 where the arguments do not fit."""
    commands: dict[str, Callable[[argparse.Namespace], int]]
    commands = {"explain": _explain, "advise": _advise}
    options = parser().parse_args(arguments)
    try:
        return commands[options.command](options)
    except UnfitArguments as error:  # what the model itself raises keeps its traceback
        parser().exit(2, f"shardtensor: error: {error}\n")


def _explain(options: argparse.Namespace) -> int:
    mesh = options.mesh
    sizes = dict(enumerate(options.sizes)) if options.sizes else None
    shard = options.shard if len(options.shard) > 1 else options.shard[0]
    only = range(torch.Size(mesh).numel()) if options.only == "all" else options.only
    found = shardtensor.explain(
        _model(options.model, options.meta),
        *_inputs(options.input, options.dtype or [torch.float32]),
        mesh=mesh,
        shard=shard,
        shard_sizes=sizes,
        backward=options.backward,
        only=only,
        values=True if options.values else None,
    )
    print(json.dumps(found.to_dict(), indent=1) if options.json else found.share() if options.share else found)
    if options.html:
        try:
            found.to_html(options.html)
        except OSError as error:
            raise UnfitArguments(f"--html: {error}") from None
    return int(bool(found.refused or found.stopped))


def _advise(options: argparse.Namespace) -> int:
    given: dict[str, Any] = {n: getattr(options, n) for n in MACHINE_OPTIONS if getattr(options, n) is not None}
    machine = replace(MACHINES[options.device], **given, name="given") if given else MACHINES[options.device]
    found = shardtensor.advise(
        _model(options.model, options.meta),
        *_inputs(options.input, options.dtype or [torch.float32]),
        ranks=options.ranks,
        dims=options.dims,
        machine=machine,
        backward=options.backward,
        tried=_show_choice,
    )
    print(found)
    return int(found.best is None)


def _show_choice(choice: Choice, left: int) -> None:
    outcome = "refused" if choice.refused else f"{1e3 * choice.seconds:.3g} ms"
    print(f"{choice}: {outcome}; {left} left", file=sys.stderr, flush=True)


def _model(name: str, meta: bool) -> Any:
    """What the named function returns; on the meta device its weights have no memory."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise UnfitArguments(
            f"{name!r} is not of the form module:function, such as models:unet for unet() of models.py"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports what is not
        raise UnfitArguments(
            f"there is no module {error.name!r} in this folder or on sys.path; the file models.py is the module models"
        ) from None
    try:
        make = operator.attrgetter(function)(found)
    except AttributeError:
        raise UnfitArguments(f"module {module!r} ({getattr(found, '__file__', None)}) has no {function!r}") from None
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise UnfitArguments(f"{name} is of type {type(make).__name__}, not a function that returns a model")
    with torch.device("meta") if meta else nullcontext():
        model = make()
    if not callable(model):
        raise UnfitArguments(f"{name} returns a value of type {type(model).__name__}, not a model")
    return model


def _inputs(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    if len(dtypes) not in (1, len(shapes)):
        raise UnfitArguments(f"{len(dtypes)} dtypes for {len(shapes)} inputs: give one for all, or one each")
    each = list(dtypes) * len(shapes) if len(dtypes) == 1 else dtypes
    return [torch.empty(*shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, each)]


if __name__ == "__main__":
    sys.exit(main())

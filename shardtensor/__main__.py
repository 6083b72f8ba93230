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

from .observe import migrate
from .observe.explain import MACHINES, Choice, UnfitArguments

_MACHINE = {
    "flops": "floating-point operations per second of a rank",
    "memory_bandwidth": "bytes per second that a rank reads and writes",
    "latency": "seconds of a message or collective",
    "bandwidth": "bytes per second of a rank's messages and collectives",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, 1 where something is refused, or 2 where the arguments do not fit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except UnfitArguments as error:  # what the model itself raises keeps its traceback
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardtensor", description="What models do on shards.")
    commands = parser.add_subparsers(required=True)
    explain = commands.add_parser(
        "explain",
        help="messages, bytes, memory, balance and refusals, layer by layer, without a cluster",
        description="What a model would do on the ranks of a mesh, layer by layer, worked out in one process.",
    )
    _add_model(explain)
    explain.add_argument("--mesh", required=True, type=_lengths, help="ranks, or the shape of the mesh: 4 or 2x2")
    explain.add_argument(
        "--shard",
        required=True,
        action="append",
        type=_shard,
        help="tensor dims, one per mesh dim: 2 or 2,3; once for all inputs, or for each of them (plain: not sharded)",
    )
    explain.add_argument("--sizes", type=_sizes, help="shard sizes, one list per mesh dim: 300+1050 or 300+1050,2700")
    explain.add_argument("--ranks", type=_ranks, help='ranks to run, "all" or 0,3 (default: a sample of large worlds)')
    explain.add_argument("--values", action="store_true", help="run with values, in the memory of one rank")
    explain.add_argument("--json", action="store_true", help="print JSON in place of a table")
    explain.add_argument("--html", metavar="FILE", help="write a page, too")
    explain.set_defaults(command=_explain)
    advise = commands.add_parser(
        "advise",
        help="which dims to shard, in which sizes, and whether it pays",
        description="Ways to shard a model's input over a number of ranks, by a model of the machine.",
    )
    _add_model(advise)
    advise.add_argument("--ranks", required=True, type=int, help="how many there are")
    advise.add_argument("--dims", type=_dims, help="tensor dims to try: 2,3 (default: all that are long enough)")
    advise.add_argument("--device", choices=MACHINES, default="h100", help="the machine to assume (default: h100)")
    for name, what in _MACHINE.items():
        option = f"--{name.replace('_', '-')}"
        advise.add_argument(option, type=float, help=f"of the machine: {what} (default: that of the device)")
    advise.set_defaults(command=_advise)
    migrating = commands.add_parser(
        "migrate",
        help="the lines to change in a program that comes from elsewhere",
        description=(migrate.__doc__ or "").split("\n\n")[0],
    )
    migrating.add_argument("paths", nargs="+", metavar="PATH", help="Python files, or folders of them")
    migrating.add_argument(
        "--only", choices=migrate.ORIGINS, help="where the program comes from; default: any of these"
    )
    migrating.set_defaults(command=migrate.show)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="module:function", help="a function that returns the model, or the model")
    parser.add_argument("--input", required=True, action="append", type=_lengths, help="shape of an input: 1x3x64x64")
    parser.add_argument(
        "--dtype", action="append", type=_dtype, help="of the inputs, one for all or one each (default: float32)"
    )
    parser.add_argument("--meta", action="store_true", help="make the model on the meta device, if it is too large")
    parser.add_argument("--backward", action="store_true", help="a backward pass as well")


def _explain(options: argparse.Namespace) -> int:
    mesh = options.mesh
    sizes = dict(enumerate(options.sizes)) if options.sizes else None
    shard = options.shard if len(options.shard) > 1 else options.shard[0]
    ranks = range(torch.Size(mesh).numel()) if options.ranks == "all" else options.ranks
    found = shardtensor.explain(
        _model(options.model, options.meta),
        *_inputs(options.input, options.dtype or [torch.float32]),
        mesh=mesh,
        shard=shard,
        shard_sizes=sizes,
        backward=options.backward,
        ranks=ranks,
        values=True if options.values else None,
    )
    print(json.dumps(found.to_dict(), indent=1) if options.json else found)
    if options.html:
        try:
            found.to_html(options.html)
        except OSError as error:
            raise UnfitArguments(f"--html: {error}") from None
    return int(bool(found.refused or found.stopped))


def _advise(options: argparse.Namespace) -> int:
    given: dict[str, Any] = {n: getattr(options, n) for n in _MACHINE if getattr(options, n) is not None}
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
        raise UnfitArguments(f"{name} is of type {type(make).__name__}, and not a function that returns a model")
    with torch.device("meta") if meta else nullcontext():
        model = make()
    if not callable(model):
        raise UnfitArguments(f"{name} returns a value of type {type(model).__name__}, and not a model")
    return model


def _inputs(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    if len(dtypes) not in (1, len(shapes)):
        raise UnfitArguments(f"{len(dtypes)} dtypes for {len(shapes)} inputs: give one for all, or one each")
    each = list(dtypes) * len(shapes) if len(dtypes) == 1 else dtypes
    return [torch.empty(*shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, each)]


# -- arguments --------------------------------------------------------------------------------------------------------


def _number(text: str, form: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; give {form}")
    return int(text)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_number(part, "lengths with x between them, such as 2x2 or 1x3x64x64") for part in text.split("x"))


def _dims(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == "-" else _number(part, "dims such as 2, or 2,3") for part in text.split(","))


def _shard(text: str) -> tuple[int | None, ...] | None:
    return None if text == "plain" else _dims(text)


def _sizes(text: str) -> list[tuple[int, ...]]:
    form = "sizes such as 300+1050, or 300+1050,2700 for two mesh dims"
    return [tuple(_number(n, form) for n in part.split("+")) for part in text.split(",")]


def _ranks(text: str) -> list[int] | str:
    return text if text == "all" else [_number(part, 'ranks such as 0,3, or "all"') for part in text.split(",")]


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"torch has no dtype {text!r}; give one such as float32 or bfloat16")
    return dtype


if __name__ == "__main__":
    sys.exit(main())

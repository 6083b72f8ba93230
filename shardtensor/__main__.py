"""``python -m shardtensor``: look at what a model would do on shards, without a cluster.

python -m shardtensor explain models:unet --input 1x3x1350x2700 --mesh 4 --shard 2
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

import shardtensor

from .preview import Machine

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, or 1 where something is refused."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardtensor", description="What models do on shards.")
    commands = parser.add_subparsers(required=True)
    explain = commands.add_parser(
        "explain",
        help="messages, bytes, memory, balance and refusals, layer by layer, without a cluster",
        description="What a model would do on the ranks of a mesh, layer by layer, worked out in one process.",
    )
    _add_model(explain)
    explain.add_argument("--mesh", required=True, type=_lengths, help="ranks, or the shape of the mesh: 4 or 2x2")
    explain.add_argument("--shard", required=True, type=_dims, help="tensor dims, one per mesh dim: 2 or 2,3")
    explain.add_argument("--sizes", type=_sizes, help="shard sizes, one list per mesh dim: 300+1050 or 300+1050,2700")
    explain.add_argument("--ranks", type=_ranks, help='ranks to run, "all" or 0,3 (default: a sample of large worlds)')
    explain.add_argument("--values", action="store_true", help="run with values, in the memory of one rank")
    explain.add_argument(
        "--implicit-replication", action="store_true", help="for models that write to tensors of their own"
    )
    explain.add_argument("--json", action="store_true", help="print JSON in place of a table")
    explain.add_argument("--html", metavar="FILE", help="write a page, too")
    explain.set_defaults(command=_explain)
    advise = commands.add_parser(
        "advise",
        help="which dims to shard, in which sizes, and whether it pays",
        description="Ways to shard a model's input over a number of ranks, by a model of the machine.",
    )
    _add_model(advise)
    advise.add_argument("--ranks", required=True, type=int)
    advise.add_argument("--dims", type=_dims, help="tensor dims to try: 2,3 (default: all that are long enough)")
    for name, default in vars(Machine()).items():
        option = f"--{name.replace('_', '-')}"
        advise.add_argument(option, type=float, default=default, help=f"of the machine, in SI units ({default:g})")
    advise.set_defaults(command=_advise)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="module:function", help="what makes the model when it is called")
    parser.add_argument("--input", required=True, action="append", type=_lengths, help="shape of an input: 1x3x64x64")
    parser.add_argument("--dtype", action="append", help="of the inputs, one for all or one each (default: float32)")
    parser.add_argument("--meta", action="store_true", help="make the model on the meta device, if it is too large")
    parser.add_argument("--backward", action="store_true", help="a backward pass as well")


def _explain(options: argparse.Namespace) -> int:
    mesh = options.mesh
    sizes = dict(enumerate(options.sizes)) if options.sizes else None
    ranks = range(torch.Size(mesh).numel()) if options.ranks == "all" else options.ranks
    found = shardtensor.explain(
        _model(options.model, options.meta),
        *_inputs(options.input, options.dtype or ["float32"]),
        mesh=mesh,
        shard=tuple(options.shard),
        shard_sizes=sizes,
        backward=options.backward,
        ranks=ranks,
        values=True if options.values else None,
        implicit_replication=options.implicit_replication,
    )
    print(json.dumps(found.to_dict(), indent=1) if options.json else found)
    if options.html:
        found.to_html(options.html)
    return int(bool(found.refused or found.stopped))


def _advise(options: argparse.Namespace) -> int:
    found = shardtensor.advise(
        _model(options.model, options.meta),
        *_inputs(options.input, options.dtype or ["float32"]),
        ranks=options.ranks,
        dims=options.dims,
        machine=Machine(**{name: getattr(options, name) for name in vars(Machine())}),
        backward=options.backward,
    )
    print(found)
    return int(found.best is None)


def _model(name: str, meta: bool) -> Any:
    """What the named function makes; on the meta device its weights have no memory."""
    make = pkgutil.resolve_name(name)
    with torch.device("meta") if meta else nullcontext():
        return make()


def _inputs(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[torch.Tensor]:
    if len(dtypes) not in (1, len(shapes)):
        raise SystemExit(f"{len(dtypes)} dtypes for {len(shapes)} inputs: give one for all, or one each")
    named = list(dtypes) * len(shapes) if len(dtypes) == 1 else dtypes
    return [torch.empty(*shape, dtype=getattr(torch, name), device="meta") for shape, name in zip(shapes, named)]


# -- arguments --------------------------------------------------------------------------------------------------------


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def _dims(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == "-" else int(part) for part in text.split(","))


def _sizes(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in part.split("+")) for part in text.split(",")]


def _ranks(text: str) -> list[int] | str:
    return text if text == "all" else [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())

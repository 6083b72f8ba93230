"""``ctc_loss``: connectionist temporal classification, whose batch may be sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.tensor import ShardTensor
from ...operators.declaration import Arguments, Composed
from ...ranks.cuda_graphs import check_not_captured
from ..common.batch_parallel import Names, by_batch
from .base import full_precision, loss


def _whole_numbers(value: Any, device: torch.device) -> Tensor:
    """Lengths, or targets that follow each other: a few numbers per entry of the batch, on every rank.

    torch takes them from the host, too: they are what its kernels are launched by.
    """
    if isinstance(value, ShardTensor):
        return value.full_tensor()
    return value.to(device) if isinstance(value, Tensor) else torch.tensor(list(value), device=device)


def _check_batch(given: dict[str, Any], batch: int) -> None:
    """Raise where targets or lengths are not those of ``batch`` sequences."""
    for name in ("input_lengths", "target_lengths"):
        lengths = given[name]
        n = lengths.numel() if isinstance(lengths, Tensor) else len(lengths)
        if n != batch:
            raise RuntimeError(f"{name} must be of size batch_size, {batch}, but has {n} elements")
    targets = given["targets"]
    if targets.ndim == 2 and targets.shape[0] != batch:
        raise RuntimeError(f"targets of shape {tuple(targets.shape)} are not of size {batch} at dimension 0")


@loss(F.ctc_loss, tensors="log_probs", parameters="targets input_lengths target_lengths")
def plan_ctc(function: Callable[..., Tensor], call: Arguments, given: dict[str, Any], reduction: str) -> Composed:
    names = ("log_probs", "targets", "input_lengths", "target_lengths")

    def ctc_loss(*tensors: Any) -> Any:
        found = given | {name: t for name, t in zip(names, tensors, strict=True) if t is not None}
        logs, targets = found["log_probs"], found["targets"]
        check_not_captured("ctc_loss", logs.device)
        mesh = logs.device_mesh
        batched = logs.ndim == 3
        _check_batch(found, logs.shape[1] if batched else 1)
        inputs, lengths = (_whole_numbers(found[name], logs.device).reshape(-1) for name in names[2:])
        if not batched:
            logs, targets = logs.unsqueeze(1), targets.unsqueeze(0)
        if targets.ndim == 1:
            # One after the other: side by side, so that each entry of the batch has a row.
            numbers = _whole_numbers(targets, logs.device)
            longest = int(lengths.max()) if lengths.numel() else 0
            there = torch.arange(longest, device=lengths.device) < lengths[:, None]
            targets = numbers.new_zeros(there.shape).masked_scatter(there, numbers)
        elif not isinstance(targets, ShardTensor):
            targets = targets.to(logs.device)

        def loss_of(logs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
            return F.ctc_loss(logs, targets, inputs, lengths, given["blank"], "none", given["zero_infinity"])

        with full_precision(mesh.device_type) as cast:
            operands: list[tuple[Any, Names]] = [
                (cast(logs), [None, "batch", None]),
                (targets, ["batch", None]),
                (inputs, ["batch"]),
                (lengths, ["batch"]),
            ]
            (terms,) = by_batch("ctc_loss", loss_of, operands, [(lengths.shape, ["batch"])])
            if reduction == "mean":
                return (terms / lengths.clamp(min=1).to(terms.device, terms.dtype)).mean()
            return terms.sum() if reduction == "sum" else terms if batched else terms.squeeze(0)

    return Composed(ctc_loss)

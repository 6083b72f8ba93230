"""Rows of integers, and texts, from every rank: what ranks compare is gathered in this form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat import NEEDS_VALUES, is_previewed
from .._compat.c10d import c10d_all_gather, c10d_gather, c10d_scatter
from .cuda_graphs import OUTSIDE, check_not_captured
from .waiting import wait_for

Key = TypeVar("Key")
Gather = Callable[[Sequence[int]], Mapping[Key, list[int]]]


def gather_rows(row: Sequence[int], group: dist.ProcessGroup, device: torch.device | str) -> dict[int, list[int]]:
    """Every rank's ``row`` of integers, equally long everywhere, by global rank."""
    check_not_captured(
        "a comparison of what ranks say",
        device,
        remedy="give from_local its shard_sizes, unset SHARDTENSOR_DEBUG, or " + OUTSIDE,
    )
    table = gather_table(torch.tensor(row, dtype=torch.int64, device=device), group)
    return dict(zip(dist.get_process_group_ranks(group), table.tolist(), strict=True))


def gather_table(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's ``row`` of integers, in the rows of one tensor.

    Raises:
        DataDependentOutputException: in a preview without values, where nothing is received.
    """
    if is_previewed():
        raise NEEDS_VALUES[0]("what other ranks say")  # type: ignore[arg-type]  # it is only shown
    table = row.new_empty((group.size(), len(row)))
    wait_for(c10d_all_gather(table.view(-1), row, group), table, group)
    return table


def alike(row: Sequence[int], group: dist.ProcessGroup) -> bool:
    """Whether all ranks of the group have the same ``row``, which is gathered on its first rank; on the CPU.

    Nothing else is communicated in this way, so whoever communicates something else meanwhile gets none of its numbers.
    """
    mine = torch.tensor(row, dtype=torch.int64, device="cpu")
    answer = torch.zeros(1, dtype=torch.int64, device="cpu")
    rows = [torch.empty_like(mine) for _ in range(group.size())] if group.rank() == 0 else []
    wait_for(c10d_gather(rows, mine, group), mine, group)
    answers = [torch.tensor([int(all(map(mine.equal, rows)))], device="cpu") for _ in rows]
    wait_for(c10d_scatter(answer, answers, group), answer, group)
    return bool(answer)


def gather_texts(text: str, gather: Gather[Key], lengths: Gather[Key] | None = None) -> dict[Key, str]:
    """Every rank's ``text``, by the keys of ``gather``, which gathers rows as :func:`gather_rows` does.

    Args:
        lengths: what gathers the texts' lengths, in rows of one number; default: ``gather``.
    """
    data = list(text.encode())
    longest = max(length for [length] in (lengths or gather)([len(data)]).values())
    rows = gather([len(data), *data, *[0] * (longest - len(data))])
    return {key: bytes(data[:length]).decode() for key, (length, *data) in rows.items()}

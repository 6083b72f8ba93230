"""In what the ranks differ, in the words of every error that says so.

Whatever ranks compare, each first tells the others a few integers, among them a checksum of what it does, holds or is
asked for. Where these are not the same, all ranks know it, and gather what the checksum was made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def by_rank(texts: Mapping[int, str]) -> str:
    """The texts, each with its ranks.

    Example:
        >>> by_rank({0: "a sum", 1: "a maximum", 2: "a sum"})
        'a sum on ranks 0, 2, a maximum on rank 1'
    """
    having: dict[str, list[int]] = {}
    for rank, text in texts.items():
        having.setdefault(text, []).append(rank)
    return ", ".join(f"{text} on {named(ranks)}" for text, ranks in having.items())


def named(ranks: Sequence[int]) -> str:
    """The ranks, as in "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def first_difference(told: Mapping[int, Mapping[int, str]]) -> tuple[int, dict[int, str]] | None:
    """The first number of which the ranks have different texts, and these; None if there is none.

    Args:
        told: every rank's texts by their number.

    Example:
        >>> first_difference({0: {0: "a", 1: "b"}, 1: {0: "a"}})
        (1, {0: 'b', 1: 'nothing'})
    """
    for number in sorted(set().union(*told.values())):
        texts = {rank: theirs.get(number, "nothing") for rank, theirs in told.items()}
        if len(set(texts.values())) > 1:
            return number, texts
    return None


def check_equal(what: str, texts: Mapping[int, str]) -> None:
    """Raise ValueError where the ranks have different texts, which it shows. All ranks pass those of all."""
    if len(set(texts.values())) > 1:
        raise ValueError(f"ranks do not agree on the {what}: {by_rank(texts)}; every rank must pass the same")

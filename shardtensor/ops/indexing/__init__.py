"""Reading and writing entries by index or mask: subscripts, ``gather``, ``index_select``, embeddings."""

from . import combinations, embedding, gather, getitem, index_operators, masked_select, take  # noqa: F401

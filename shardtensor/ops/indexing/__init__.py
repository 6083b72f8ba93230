"""Reading and writing entries by index or mask: subscripts, ``gather``, ``index_select``, embeddings."""

from . import embedding, getitem, index_operators, masked_select  # noqa: F401

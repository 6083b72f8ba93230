"""Attention over all tokens: ``scaled_dot_product_attention``, ``nn.MultiheadAttention``, flex attention."""

from . import multihead, sdpa  # noqa: F401

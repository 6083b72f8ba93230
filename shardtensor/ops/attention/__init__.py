"""Attention over all tokens: ``scaled_dot_product_attention``, ``nn.MultiheadAttention``, flex attention."""

from . import flex, multihead, sdpa  # noqa: F401

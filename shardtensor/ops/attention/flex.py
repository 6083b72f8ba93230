"""``flex_attention``: refused. Its score functions are compiled with the indices of one device."""

from __future__ import annotations

from ..._compat import flex_attention_checks_operands
from ...dispatch.registry import Refusal, register

register(flex_attention_checks_operands)(
    Refusal(
        "flex_attention",
        __name__,
        "its score and mask functions know the indices of one device only",
        "use scaled_dot_product_attention with a mask or a bias, or call it on to_local() of replicated operands",
    )
)

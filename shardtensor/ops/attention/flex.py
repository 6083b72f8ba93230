"""``flex_attention``: refused. Its score functions are compiled with the indices of one device."""

from __future__ import annotations

from typing import Any

from ..._compat import flex_attention_checks_operands
from ...errors import refuse
from ...registry import register


@register(flex_attention_checks_operands)
def _refuse(query: Any, key: Any, value: Any) -> None:
    raise refuse(
        "flex_attention",
        [query, key, value],
        "its score and mask functions know the indices of one device only",
        "use scaled_dot_product_attention with a mask or a bias, or call it on to_local() of replicated operands",
    )

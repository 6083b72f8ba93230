"""``flex_attention``: refused. Its score functions are compiled with the indices of one device."""

from __future__ import annotations

from ..._compat import flex_attention_checks_operands
from ...errors import refuse
from ...operators import Arguments, Plan, operator
from ...spec import ShardTensorSpec


@operator(flex_attention_checks_operands, tensors="query key value")
def plan_flex_attention(call: Arguments, query: ShardTensorSpec, key: ShardTensorSpec, value: ShardTensorSpec) -> Plan:
    raise refuse(
        "flex_attention",
        [query, key, value],
        "its score and mask functions know the indices of one device only",
        "use scaled_dot_product_attention with a mask or a bias, or call it on to_local() of replicated operands",
    )

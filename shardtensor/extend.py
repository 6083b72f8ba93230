"""For those who add operators: how one is declared, registered and looked up.

>>> from shardtensor.extend import Arguments, LocalPlan, operator
"""

from .dispatch.registry import Support, register, registered, unregister
from .operators.arguments import Arguments
from .operators.declaration import operator
from .operators.plan import Composed, LocalPlan, Plan

__all__ = [
    "Arguments",
    "Composed",
    "LocalPlan",
    "Plan",
    "Support",
    "operator",
    "register",
    "registered",
    "unregister",
]

"""opt_einsum chooses by the module of an array's class which library contracts it. For ShardTensors that is torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

from ...dispatch.registry import register


def _register(contract: ModuleType) -> None:
    original = contract.infer_backend

    @register(getattr(original, "__wrapped__", original))
    def infer_backend(x: Any) -> str:
        return "torch"


wrapt.register_post_import_hook(_register, "opt_einsum.contract")

"""Every private torch API that the package touches, and what differs between torch versions.

Nothing else imports from a module whose name starts with an underscore, so a new torch release is checked here.
Tested with torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

DisableTorchFunction = torch._C.DisableTorchFunctionSubclass

__all__ = [
    "DTensorSpec",
    "DisableTorchFunction",
    "TensorMeta",
    "current_mesh",
    "fake_mode",
    "is_plain_shard",
    "new_wrapper",
    "register_scripting",
]


def new_wrapper(cls: type, local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> Any:
    """Create a wrapper tensor of DTensor layout around ``local`` (2.4 us; no ``__init__`` is run)."""
    return torch.Tensor._dtensor__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[attr-defined]


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:`` block; RuntimeError where there is none."""
    return _mesh_resources.get_current_mesh()


def is_plain_shard(placement: object) -> bool:
    """Whether ``placement`` is ``Shard`` itself rather than the strided kind that FSDP2 over TP makes."""
    return not isinstance(placement, _StridedShard)


def fake_mode() -> Any:
    """A mode under which operators compute shapes, strides and dtypes only."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def register_scripting(function: Any, original: Any) -> None:
    """Let ``torch.jit.script`` treat ``function`` as the builtin operator that ``original`` is, if it is one."""
    from torch.jit._builtins import _find_builtin, _register_builtin

    name = _find_builtin(original)
    if name is not None:
        _register_builtin(function, name)

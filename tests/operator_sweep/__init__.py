"""Every operator that torch lists in its own database of samples, on shards, against one device.

``python -m operator_sweep`` (in ``tests/``) runs all of it, prints what is not right and not refused, and with
``--write`` renews the tables of ``docs/operators-tested.md``. ``test_operator_sweep.py`` runs a part of it.
"""

from .cases import database, operator_names
from .drive import Report, sweep

__all__ = ["Report", "database", "operator_names", "sweep"]

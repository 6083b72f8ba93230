"""Random programs of tensor operations, on shards against one device.

A program is a few lines of Python: views, writes, reductions, joins, functions of networks, drawn by a seed from the
tables of ``grammar.py``. ``python -m random_programs`` (in ``tests/``) runs many, and prints those whose numbers or
errors differ from one device's, without the lines that do not matter. ``test_random_programs.py`` runs some.
"""

from .drive import Report, run_programs
from .program import Program, draw

__all__ = ["Program", "Report", "draw", "run_programs"]

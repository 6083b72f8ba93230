"""Networks of other packages, unmodified, with a cut input: a module for each package, and their common oracle."""

from networks import torchvision_set_up  # noqa: F401  for the packages that import torchvision

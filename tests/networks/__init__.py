"""Networks of other packages, unmodified, with a cut input: a module for each package, and their common oracle."""

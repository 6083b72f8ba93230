"""What ranks tell each other besides the data of operators, and how they wait.

- ``callers``: the lines of the program that an operator was called from, for errors.
- ``summaries``: a tensor's values in a few integers.
- ``history``: what this rank has communicated, in a count and a checksum, and which thread did.
- ``failures``: a rank dies or raises: what the others are told.
- ``waiting``: how a rank waits for a collective.
- ``groups``: process groups of this package's own.
- ``rows``: integers and texts gathered from every rank.
- ``debug_mode``: ``SHARDTENSOR_DEBUG=1``, comparisons in front of everything that is communicated.
- ``first_use``: what plain tensors hold when they are used first.
- ``agreement``: what ranks claim about their local tensors, compared.
- ``equal_values``: copies compared by digests; weights made equal.
- ``streams``: streams of a device that wait for each other.
- ``cuda_graphs``: what a CUDA graph cannot contain is refused.
"""

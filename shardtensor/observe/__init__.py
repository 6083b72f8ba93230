"""What a program does on shards, seen from outside.

- ``explain``: a model's run as each rank in one process, without values; ``advise``, built on it.
- ``drawing``: ``visualize``: which rank holds what.
- ``timelines``: ``timeline``: what ranks did when.
- ``counting``: messages, bytes and collectives, counted.
- ``simulate``: each rank of a huge world in turn, without processes.
- ``migrate``: the lines to change in programs that come from elsewhere.
"""

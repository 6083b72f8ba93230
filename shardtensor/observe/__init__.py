"""What is communicated, seen from outside: counted, or asked of each rank of a huge world in one process.

``shardtensor.testing``, previews and timelines share it.
"""

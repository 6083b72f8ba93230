"""What moves pieces of tensors between ranks.

- ``tracing``: what ``torch.compile`` does differently: communication as operators of its graph.
- ``exchange``: intervals in one packed message per peer.
- ``zeros``: zeros that are put next to a part of a tensor.
- ``halo``: intervals that overlap between ranks, put next to the shard, and their gradients back.
- ``redistribute``: from every layout to every other one, on local tensors.
"""

"""``ShardTensor``, and how a call of torch reaches the operator that carries it out.

- ``registry``: the table of functions and operators.
- ``planning``: plans of aten operators, and the cache of all plans.
- ``gathering``: what may be gathered.
- ``plain_tensors``: plain tensors of a shard's size, where one of the global size is called for.
- ``copies``: views that are copies.
- ``open_layouts``: tensors whose layout the first write decides.
- ``aten_calls``: below autograd: from an aten call to local work.
- ``user_strategies``: operators with a sharding strategy that a user has given DTensor.
- ``conversions``: between local tensors and ShardTensors, differentiably.
- ``torch_functions``: above autograd: what becomes of a call of a torch function.
- ``levels``: what becomes of a call inside a transform of torch.func, and with dual tensors.
- ``tensor``: the class.
- ``chunks``: which part of the global tensor a rank has, for checkpoints.
- ``gradients``: ``backward()`` and ``autograd.grad()``.
- ``scatter``: ``scatter_tensor``.
- ``patches``: functions that torch does not dispatch.
"""

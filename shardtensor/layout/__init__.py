"""How a tensor lies on a mesh.

- ``geometry``: shard sizes, boundaries, intervals and windows: arithmetic on integers.
- ``strides``: strides of tensors that are described before they exist.
- ``placements``: placements and shard sizes, checked and completed.
- ``spec``: ``ShardTensorSpec``, which holds them with the mesh and the global shape.
- ``caches``: what is cached by specs and meshes, forgotten with its world.
"""

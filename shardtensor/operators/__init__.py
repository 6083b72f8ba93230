"""What an operator above autograd is made of.

- ``weight_gradients``: the sum of plain weights' gradients over ranks.
- ``plan``: what a plan does on this rank, and how autograd differentiates it.
- ``arguments``: a call's arguments by the names of the declaration, and the call as what makes a plan sees it.
- ``declaration``: ``operator``, which has plans made once and run bare.
- ``transforms``: ``torch.func`` of functions that meet ShardTensors: derivatives.
- ``mapping``: its ``vmap``.
"""

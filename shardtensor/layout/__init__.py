"""How a tensor lies on a mesh."""

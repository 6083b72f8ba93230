"""What several families share: alignment of operands, halos, rings, contractions, a distributed sort."""

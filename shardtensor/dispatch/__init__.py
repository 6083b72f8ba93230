"""``ShardTensor``, and how a call of torch reaches the operator that carries it out."""

"""What a program does on shards, seen from outside."""

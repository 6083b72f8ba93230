"""What moves pieces of tensors between ranks."""

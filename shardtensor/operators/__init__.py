"""What an operator above autograd is made of."""

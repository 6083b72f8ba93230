"""Recurrent networks: ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and their cells."""

from . import rnn  # noqa: F401

"""CUDA's kernels of LSTM and GRU cells, which compute the gates of a step at once, as elementwise operators."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def _gates(gates: Tensor, bias: Tensor | None, number: int) -> tuple[Tensor, ...]:
    return (gates if bias is None else gates + bias).chunk(number, 1)


def lstm(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    given, hidden = _gates(input_gates, input_bias, 4), _gates(hidden_gates, hidden_bias, 4)
    i, f, g, o = (a + b for a, b in zip(given, hidden))
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    c = hy * o * (1 - cy.tanh().square())
    if grad_cy is not None:
        c = c + grad_cy
    of_gates = torch.cat(
        [c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g.square()), hy * cy.tanh() * o * (1 - o)], 1
    )
    return of_gates, c * f, of_gates.sum(0) if has_bias else None


def gru(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    (ir, iz, i_n), (hr, hz, h_n) = _gates(input_gates, input_bias, 3), _gates(hidden_gates, hidden_bias, 3)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * h_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, h_n], 1)


def gru_backward(grad_hy, workspace, has_bias):
    r, z, n, hx, h_n = workspace.chunk(5, 1)
    of_z = grad_hy * (hx - n) * z * (1 - z)
    of_n = grad_hy * (1 - z) * (1 - n.square())
    of_r = of_n * h_n * r * (1 - r)
    given, hidden = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    biases = (given.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return given, hidden, grad_hy * z, *biases


def register() -> None:
    """Put these in place of the kernels that a build without CUDA does not have."""
    for name, kernel in {
        "_thnn_fused_lstm_cell": lstm,
        "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
        "_thnn_fused_gru_cell": gru,
        "_thnn_fused_gru_cell_backward": gru_backward,
    }.items():
        _library.impl(name, kernel, "CUDA")

"""Solvers of torchdiffeq, torchsde and torchcde; more of them are in test_other_programs.py.

Those that choose their steps do so by norms of the whole state, on all ranks alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact
from networks.programs import layer, load, of

PACKAGE = "torch"
STATES, PATHS = (21, 6), (5, 9, 3)


class Field(nn.Module):
    """The right hand side, with diagonal noise for stochastic equations."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        drift: Tensor = self.layers(y)
        return drift

    f = forward

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.layers(y).sigmoid() * 0.1


class Controlled(nn.Module):
    """A matrix for each state, by which the path's derivative is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        matrices: Tensor = self.layer(z).tanh().view(*z.shape[:-1], 4, 3)
        return matrices


def times(x: Tensor) -> Tensor:
    return torch.linspace(0, 1, 3, dtype=x.dtype)


def ordinary(method: str) -> Network:
    solved = lambda field, x: load("torchdiffeq").odeint(field, x, times(x), method=method, rtol=1e-3, atol=1e-4)  # noqa: E731
    return layer(Field, STATES, 0, call=solved, reduced=300.0)


def adjoint(field: nn.Module, x: Tensor) -> Tensor:
    path: Tensor = load("torchdiffeq").odeint_adjoint(field, x, times(x), method="dopri5")
    return path


def two_states(field: nn.Module, x: Tensor) -> Any:
    squares = lambda t, y: (field(t, y[0]), y[0].square().sum(1, keepdim=True))  # noqa: E731
    return load("torchdiffeq").odeint(squares, (x, x[:, :1] * 0), times(x), method="dopri5")


def until_an_event(field: nn.Module, x: Tensor) -> Any:
    start = torch.tensor(0.0, dtype=x.dtype)
    event = lambda t, y: t - 0.5  # noqa: E731
    return load("torchdiffeq").odeint_event(field, x, start, event_fn=event, method="dopri5")[1]


def stochastic(field: Any, x: Tensor, method: str, solver: str = "sdeint", drawn: bool = True) -> Tensor:
    """With ``drawn``, the noise is a plain tensor, that of one device; else it is the package's own choice."""
    package, options = load("torchsde"), {}
    numpy.random.seed(1)  # of which the package draws the seed of its noise
    field.sde_type = "ito" if method in ("euler", "milstein", "srk") else "stratonovich"
    if drawn:
        area = "space-time" if method == "srk" else "none"
        options["bm"] = package.BrownianInterval(
            0.0, 1.0, size=tuple(x.shape), dtype=x.dtype, entropy=3, levy_area_approximation=area
        )
    path: Tensor = getattr(package, solver)(field, x, times(x), dt=0.25, method=method, **options)
    return path


def controlled(field: nn.Module, x: Tensor) -> Any:
    package, starts = load("torchcde"), x[:, 0].repeat(1, 2)[:, :4]
    path = package.CubicSpline(package.hermite_cubic_coefficients_with_backward_differences(x))
    stops = torch.tensor([0.0, 4.0, 8.0], dtype=x.dtype)
    return package.cdeint(X=path, func=field, z0=starts, t=stops, adjoint=False, method="rk4")


def filled(x: Tensor) -> Tensor:
    """Missing values are interpolated, as many in each path as are large."""
    coefficients: Tensor = load("torchcde").linear_interpolation_coeffs(torch.where(x > 1.0, torch.nan, x))
    return coefficients


def slope(x: Tensor) -> Tensor:
    package = load("torchcde")
    derivative: Tensor = package.CubicSpline(package.natural_cubic_coeffs(x)).derivative(2.5)
    return derivative


NETWORKS = {
    **{
        f"torchdiffeq, {method}": ordinary(method)
        for method in ("bosh3", "fehlberg2", "adaptive_heun", "heun2", "heun3", "implicit_adams")
    },
    "torchdiffeq, adjoint of dopri5": layer(Field, STATES, 0, call=adjoint, tolerance=1e-6, reduced=300.0),
    "torchdiffeq, two states": layer(Field, STATES, 0, call=two_states, reduced=300.0),
    "torchdiffeq, event": layer(Field, STATES, 0, call=until_an_event, tolerance=1e-6, reduced=300.0),
    **{
        f"torchsde, {method}": layer(Field, STATES, 0, call=partial(stochastic, method=method), reduced=30.0)
        for method in ("euler", "milstein", "srk", "reversible_heun", "midpoint")
    },
    "torchsde, adjoint": layer(
        Field,
        STATES,
        0,
        call=partial(stochastic, method="milstein", solver="sdeint_adjoint"),
        tolerance=1e-7,
        reduced=300.0,
    ),
    "torchsde, noise of its own": layer(
        Field, STATES, 0, call=partial(stochastic, method="euler", drawn=False), reduced=30.0
    ),
    "torchcde, cdeint": layer(Controlled, PATHS, 0, call=controlled, reduced=30.0),
    "torchcde, missing values": of(filled, PATHS, 0, backward=False),
    "torchcde, slope of a spline": of(slope, PATHS, 0),
    "torchcde, rectilinear": of(lambda x: load("torchcde").linear_interpolation_coeffs(x, rectilinear=0), PATHS, 0),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("torchsde, euler",), of_packages=True)

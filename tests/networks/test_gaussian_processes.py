"""Kernels of gpytorch, and a Gaussian process; more kernels are in test_other_programs.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from networks.oracle import all_exact, all_refused, text
from networks.programs import layer, of

PACKAGE = "torch"
gpytorch = pytest.importorskip("gpytorch")
kernels = gpytorch.kernels

POINTS = (33, 2)
PLAIN = "ConstantKernel CosineKernel PiecewisePolynomialKernel RBFKernelGrad"
KERNELS: dict[str, Callable[[], nn.Module]] = {
    **{name: getattr(kernels, name) for name in PLAIN.split()},
    "AdditiveStructureKernel": lambda: kernels.AdditiveStructureKernel(kernels.RBFKernel(), 2),
    "ArcKernel": lambda: kernels.ArcKernel(kernels.MaternKernel(), ard_num_dims=2),
    "GridInterpolationKernel": lambda: kernels.GridInterpolationKernel(
        kernels.RBFKernel(), grid_size=8, num_dims=2, grid_bounds=((-4.0, 4.0), (-4.0, 4.0))
    ),
    "InducingPointKernel": lambda: kernels.InducingPointKernel(
        kernels.RBFKernel(), text(5, 2), gpytorch.likelihoods.GaussianLikelihood()
    ),
    "MaternKernel, 3/2": lambda: kernels.MaternKernel(nu=1.5),
    "NewtonGirardAdditiveKernel": lambda: kernels.NewtonGirardAdditiveKernel(kernels.RBFKernel(), 2),
    "PolynomialKernel": lambda: kernels.PolynomialKernel(2),
    "RFFKernel": lambda: kernels.RFFKernel(8, num_dims=2),
    "RQKernel, two scales": lambda: kernels.RQKernel(ard_num_dims=2),
    "ScaleKernel": lambda: kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2)),
    "SpectralMixtureKernel": lambda: kernels.SpectralMixtureKernel(3, ard_num_dims=2),
    "sum and product": lambda: kernels.RBFKernel() * kernels.MaternKernel() + kernels.LinearKernel(),
}


class Process(gpytorch.models.ExactGP):  # type: ignore[misc]
    def __init__(self, x: Tensor, y: Tensor, likelihood: nn.Module) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernels.ScaleKernel(kernels.RBFKernel())

    def forward(self, x: Tensor) -> object:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def in_a_disk(kernel: nn.Module, x: Tensor) -> Tensor:
    matrix: Tensor = kernel(x.tanh() * 0.7).to_dense()
    return matrix


def likelihood(x: Tensor) -> Tensor:
    """Of the points themselves, in a process that is made of them."""
    noise = gpytorch.likelihoods.GaussianLikelihood().double()
    values = x[:, 0].sin()
    process = Process(x, values, noise).double().train()
    logarithm: Tensor = gpytorch.mlls.ExactMarginalLogLikelihood(noise, process)(process(x), values)
    return logarithm


NETWORKS = {
    **{
        name: layer(make, POINTS, 0, call=lambda kernel, x: kernel(x).to_dense(), tolerance=1e-8, reduced=60.0)
        for name, make in KERNELS.items()
    },
    "CylindricalKernel": layer(
        lambda: kernels.CylindricalKernel(3, kernels.RBFKernel()), POINTS, 0, call=in_a_disk, tolerance=1e-8
    ),
    "likelihood": of(likelihood, POINTS, 0, tolerance=1e-7),
}
# It puts the points' weights on a grid by a sparse matrix, of which each rank would have some columns.
REFUSED = {"GridInterpolationKernel": r"a sparse tensor's constructor: .*Remedy: make it of plain tensors"}


test_networks_are_exact = all_exact(__name__, [n for n in NETWORKS if n not in REFUSED], always=("ScaleKernel",))
test_refusals_say_what_to_do = all_refused(__name__, REFUSED)

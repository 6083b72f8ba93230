"""Networks, losses and tools of packages of which a few each are run: solvers, wavelets, audio, adapters, explanations.

Chosen to cover what programs do beyond calling a network: writing to tensors that they make, gradients inside of the
forward pass, recurrences, hooks, optimizer steps, functions of other functions. The name of each begins with that of
the package that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from networks import torchvision_set_up  # noqa: F401  # before a package imports torchvision
from networks.oracle import Network, all_exact
from networks.programs import layer, load, of

PACKAGE = "torch"
torch.serialization.add_safe_globals([slice])  # which e3nn 0.4.4 has among the constants that it loads

IMAGE, TOKENS, PAIRS, POINTS, WAVE = (2, 3, 40, 24), (2, 21, 16), (2, 3, 65, 48), (97, 2), (1, 2, 4001)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))


def classifier() -> nn.Module:
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), *pooled)


# -- differential equations ------------------------------------------------------------------------------------------


def solved(x: Tensor, field: nn.Module, method: str, adjoint: bool) -> Tensor:
    package, times = load("torchdiffeq"), torch.linspace(0, 1, 4, dtype=x.dtype)
    if adjoint:
        parameters = tuple(field.parameters())
        return package.odeint_adjoint(lambda t, y: field(y), x, times, method=method, adjoint_params=parameters)
    return package.odeint(lambda t, y: field(y), x, times, method=method)


def fitted(x: Tensor, field: nn.Module) -> Tensor:
    """Steps of an optimizer with gradients of the adjoint method."""
    optimizer = torch.optim.SGD(field.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        solved(x.detach(), field, "rk4", True)[-1].square().mean().backward()
        optimizer.step()
    return solved(x, field, "rk4", True)


def laplacian(x: Tensor, network: nn.Module) -> Tensor:
    x = x * 1
    (slope,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(second).sum(0)


def functional_laplacian(x: Tensor, network: nn.Module) -> Tensor:
    hessians = torch.func.vmap(torch.func.hessian(lambda point: network(point).squeeze()))(x)
    return hessians.diagonal(dim1=-2, dim2=-1).sum(-1)


def siren() -> nn.Module:
    return load("siren_pytorch").SirenNet(2, 16, 1, 3)


EQUATIONS = {
    **{
        f"torchdiffeq, {method}": of(partial(solved, method=method, adjoint=False), TOKENS, 1, mlp)
        for method in ("rk4", "euler", "midpoint", "explicit_adams")
    },
    **{
        f"torchdiffeq, {method}": of(partial(solved, method=method, adjoint=False), TOKENS, 1, mlp)
        for method in ("dopri5", "dopri8")  # which choose their steps
    },
    "torchdiffeq, adjoint": of(partial(solved, method="midpoint", adjoint=True), TOKENS, 1, mlp, reduced=300.0),
    "torchdiffeq, adjoint and SGD": of(fitted, TOKENS, 1, mlp, reduced=300.0),
    "torchcde, splines": of(lambda x: load("torchcde").natural_cubic_coeffs(x), (3, 21, 3), 0),
    "torchcde, backward differences": of(
        lambda x: load("torchcde").hermite_cubic_coefficients_with_backward_differences(x), (2, 21, 3), 0
    ),
    "torchcde, times": of(
        lambda x: load("torchcde").LinearInterpolation(load("torchcde").linear_interpolation_coeffs(x)).evaluate(3.5),
        (2, 21, 3),
        1,
    ),
    "siren_pytorch": layer(siren, POINTS, 0),
    "siren_pytorch, Laplacian": of(laplacian, POINTS, 0, siren),
    "siren_pytorch, Laplacian of torch.func": of(functional_laplacian, POINTS, 0, siren),
}

# -- losses and metrics ----------------------------------------------------------------------------------------------


def compared(x: Tensor, module: str, name: str, **options: Any) -> Tensor:
    """A measure of an image and a darker one."""
    image = x.sigmoid()
    return getattr(load(module), name)(image, image.detach() * 0.7 + 0.1, **options)


def transported(x: Tensor, kind: str) -> Tensor:
    loss = load("geomloss").SamplesLoss(kind, backend="tensorized")
    return loss(x, torch.ones(1, 9, 3, dtype=x.dtype)).sum()


def contrasted(x: Tensor, name: str) -> Tensor:
    return getattr(load("lightly.loss"), name)()(x, x.detach() * 0.5 + x.sin())


LOSSES = {
    **{
        f"piq, {name}": of(partial(compared, module="piq", name=name, data_range=1.0), PAIRS, 2)
        for name in ("ssim", "gmsd", "multi_scale_gmsd", "vif_p", "vsi", "mdsi", "haarpsi", "psnr", "dss")
    },
    "piq, total variation": of(lambda x: load("piq").total_variation(x.sigmoid()), PAIRS, 2),
    "pytorch_msssim": of(partial(compared, module="pytorch_msssim", name="ssim", data_range=1.0), PAIRS, 2),
    "pytorch_msssim, scales": of(
        partial(compared, module="pytorch_msssim", name="ms_ssim", data_range=1.0), (1, 1, 193, 177), 2
    ),
    "lpips": of(
        lambda x, loss: loss(x.tanh(), x.tanh().detach() * 0.5),
        (1, 3, 65, 64),
        2,
        lambda: load("lpips").LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False),
    ),
    **{f"geomloss, {kind}": of(partial(transported, kind=kind), (1, 33, 3), 1) for kind in ("energy", "gaussian")},
    "geomloss, Sinkhorn": of(
        lambda x: load("geomloss").SamplesLoss("sinkhorn", blur=0.3, backend="tensorized")(x, x.detach() * 0.5).sum(),
        (1, 33, 3),
        1,
        tolerance=1e-7,
    ),
    **{
        f"lightly, {name}": of(partial(contrasted, name=name), (32, 16), 0)
        for name in ("NTXentLoss", "BarlowTwinsLoss", "VICRegLoss", "NegativeCosineSimilarity", "DCLLoss", "TiCoLoss")
    },
}

# -- explanations, adapters, training --------------------------------------------------------------------------------


def attributed(x: Tensor, network: nn.Module, name: str) -> Tensor:
    method = getattr(load("captum.attr"), name)(network)
    weights: Tensor = method.attribute(x.detach().requires_grad_(), target=1)
    return weights.detach() * x


def adapted(config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = nn.Sequential()
        for name, each in (("a", nn.Linear(16, 24)), ("g", nn.GELU()), ("b", nn.Linear(24, 16))):
            layers.add_module(name, each)
        package = load("peft")
        adapters: nn.Module = package.get_peft_model(layers, getattr(package, config)(**options))
        return adapters

    return make


def averaged(x: Tensor, network: nn.Module) -> Tensor:
    """Steps of an optimizer, with a moving average of the weights."""
    average = load("ema_pytorch").EMA(network, beta=0.9, update_every=1, update_after_step=0)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        network(x.detach()).square().mean().backward()
        optimizer.step()
        average.update()
    result: Tensor = average.ema_model(x)
    return result


def trained(x: Tensor, network: nn.Module, module: str, name: str) -> Tensor:
    optimizer = getattr(load(module), name)(network.parameters(), lr=0.01)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(3):
        optimizer.zero_grad()
        network(x.detach()).square().mean().backward()
        optimizer.step()
    result: Tensor = network(x)
    return result


BOTH: dict[str, Any] = {"target_modules": ["a", "b"]}
TOOLS = {
    **{
        f"captum, {name}": of(partial(attributed, name=name), IMAGE, 2, classifier)
        for name in ("Saliency", "IntegratedGradients", "InputXGradient", "DeepLift", "GuidedBackprop", "Deconvolution")
    },
    **{
        f"peft, {config.removesuffix('Config')}": layer(adapted(config, **options), TOKENS, 1)
        for config, options in {
            "LoraConfig": BOTH | {"r": 4, "use_dora": True, "init_lora_weights": False},
            "LoHaConfig": BOTH | {"r": 4, "init_weights": False},
            "LoKrConfig": BOTH | {"r": 4, "init_weights": False},
            "IA3Config": BOTH | {"feedforward_modules": ["b"]},
            "OFTConfig": BOTH | {"r": 0, "oft_block_size": 4, "init_weights": False},
            "VeraConfig": {"target_modules": ["b"], "r": 4},
            "BOFTConfig": BOTH | {"boft_block_size": 4, "init_weights": False},
            "FourierFTConfig": {"target_modules": ["a"], "n_frequency": 5},
        }.items()
    },
    "ema_pytorch": of(averaged, TOKENS, 1, mlp),
    "schedulefree": of(partial(trained, module="schedulefree", name="AdamWScheduleFree"), TOKENS, 1, mlp),
    "lion_pytorch": of(partial(trained, module="lion_pytorch", name="Lion"), TOKENS, 1, mlp),
}

# -- sequences and sound ---------------------------------------------------------------------------------------------


def mamba(**options: Any) -> nn.Module:
    package = load("mambapy.mamba")
    model: nn.Module = package.Mamba(package.MambaConfig(d_model=16, n_layers=1, d_state=4, **options))
    return model


def quantized(name: str, **options: Any) -> Network:
    return layer(
        lambda: getattr(load("vector_quantize_pytorch"), name)(**options),
        (2, 21, options.get("dim", 4)),
        1,
        call=lambda network, x: network(x)[0] + x,
    )


SEQUENCES = {
    "mambapy": layer(partial(mamba, pscan=False), TOKENS, 1),
    "mambapy, parallel scan": layer(mamba, TOKENS, 1),
    "demucs, BLSTM": layer(lambda: load("demucs.demucs").BLSTM(8, layers=2, max_steps=40, skip=True), (1, 8, 101), 2),
    "demucs, LocalState": layer(lambda: load("demucs.demucs").LocalState(8, heads=2), (1, 8, 101), 2),
    "demucs, DConv": layer(lambda: load("demucs.demucs").DConv(32, lstm=False, attn=True, depth=2), (1, 32, 101), 2),
    "demucs": layer(
        lambda: load("demucs.demucs").Demucs(
            ["drums", "voice"], channels=4, depth=2, growth=1, lstm_layers=2, resample=False, normalize=False
        ),
        WAVE,
        2,
    ),
    "demucs, spectrogram": of(lambda x: load("demucs.spec").spectro(x, 512).abs(), WAVE, 2),
    "julius, resampling": of(lambda x: load("julius").resample_frac(x, 2, 3), WAVE, 2),
    "julius, bands": of(lambda x: load("julius").split_bands(x, 100, n_bands=3), WAVE, 2),
    "perceiver_pytorch": layer(
        lambda: load("perceiver_pytorch").PerceiverIO(
            depth=2, dim=16, queries_dim=16, num_latents=7, latent_dim=16, latent_heads=2
        ),
        TOKENS,
        1,
    ),
    "local_attention": layer(
        lambda: load("local_attention").LocalMHA(dim=16, window_size=8, dim_head=8, heads=2, causal=True),
        (2, 32, 16),
        1,
    ),
    "rotary_embedding_torch": of(
        lambda x, rotary: rotary.rotate_queries_or_keys(x),
        (2, 2, 21, 16),
        2,
        lambda: load("rotary_embedding_torch").RotaryEmbedding(dim=8),
    ),
    "vector_quantize_pytorch": quantized("VectorQuantize", dim=16, codebook_size=9),
    "vector_quantize_pytorch, cosine": quantized("VectorQuantize", dim=16, codebook_size=9, use_cosine_sim=True),
    "vector_quantize_pytorch, residual": quantized("ResidualVQ", dim=16, codebook_size=9, num_quantizers=3),
    "vector_quantize_pytorch, finite scalars": quantized("FSQ", levels=[8, 5, 5, 5]),
    "chronos, residual": layer(lambda: load("chronos.chronos_bolt").ResidualBlock(16, 24, 16, "relu", 0.0), TOKENS, 1),
    "chronos, patches": layer(lambda: load("chronos.chronos_bolt").Patch(8, 8), (3, 48), 0),
}

# -- images and kernels ----------------------------------------------------------------------------------------------


def restored(make: Callable[[Any], nn.Module], shape: tuple[int, ...] = (1, 3, 40, 24)) -> Network:
    return layer(lambda: make(load("deepinv").models), shape, 2, call=lambda network, x: network(x, 0.1))


def measured(make: Callable[[Any], nn.Module], shape: tuple[int, ...] = (1, 3, 40, 24)) -> Network:
    """A measurement and its adjoint."""
    there_and_back = lambda physics, x: physics.A_adjoint(physics.A(x))  # noqa: E731
    return layer(lambda: make(load("deepinv").physics), shape, 2, call=there_and_back)


def blur(physics: Any) -> Tensor:
    kernel: Tensor = physics.blur.gaussian_blur(sigma=(1.0, 1.0)).double()
    return kernel


WIDE = (1, 3, 64, 32)
IMAGES = {
    "denoising_diffusion_pytorch": layer(
        lambda: load("denoising_diffusion_pytorch").Unet(dim=8, dim_mults=(1, 2), flash_attn=False),
        (1, 3, 40, 16),
        2,
        call=lambda network, x: network(x, torch.tensor([3.0], dtype=x.dtype)),
    ),
    "deepinv, DnCNN": restored(lambda m: m.DnCNN(3, 3, depth=4, nf=8, pretrained=None)),
    "deepinv, DRUNet": restored(lambda m: m.DRUNet(3, 3, nc=(4, 8, 8, 8), nb=1, pretrained=None), WIDE),
    "deepinv, SCUNet": restored(lambda m: m.SCUNet(pretrained=None), WIDE),
    "deepinv, TV": restored(lambda m: m.TVDenoiser(n_it_max=5)),
    "deepinv, TGV": restored(lambda m: m.TGVDenoiser(n_it_max=5)),
    "deepinv, blur": measured(lambda p: p.Blur(filter=blur(p), padding="circular")),
    "deepinv, blur by FFT": measured(lambda p: p.BlurFFT((3, 40, 24), filter=blur(p))),
    "deepinv, downsampling": measured(lambda p: p.Downsampling(img_size=(3, 40, 24), factor=2, filter="bilinear")),
    "deepinv, MRI": measured(lambda p: p.MRI(img_size=(2, 40, 24)), (1, 2, 40, 24)),
    "ptwt, Haar": of(lambda x: load("ptwt").wavedec2(x, "haar", level=2)[0], (2, 3, 48, 32), 2),
    "ptwt, there and back": of(
        lambda x: load("ptwt").waverec2(load("ptwt").wavedec2(x, "db2", level=2, mode="reflect"), "db2"),
        (2, 3, 48, 32),
        2,
    ),
    "ptwt, stationary": of(lambda x: load("ptwt").swt(x, "haar", level=2)[0], (2, 3, 48, 32), 2),
    **{
        f"gpytorch, {name}": of(
            lambda x, kernel: kernel(x).to_dense(),
            (33, 2),
            0,
            lambda name=name: getattr(load("gpytorch.kernels"), name)(),
            tolerance=1e-8,
        )
        for name in ("RBFKernel", "MaternKernel", "LinearKernel", "PeriodicKernel", "RQKernel")
    },
    "e3nn, harmonics": of(  # whose squares add up to a constant
        lambda x: load("e3nn.o3").spherical_harmonics([0, 1, 2], x, normalize=True).exp(), (97, 3), 0, tolerance=1e-7
    ),
    "e3nn, product": of(
        lambda x, product: product(x, x),
        (33, 16),
        0,
        lambda: load("e3nn.o3").FullyConnectedTensorProduct("4x0e+4x1o", "4x0e+4x1o", "4x0e+4x1o"),
        tolerance=1e-7,
    ),
}
NETWORKS = {**EQUATIONS, **LOSSES, **TOOLS, **SEQUENCES, **IMAGES}


test_networks_are_exact = all_exact(__name__, NETWORKS, of_packages=True)

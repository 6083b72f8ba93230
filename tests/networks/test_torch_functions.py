"""What programs wrap around networks by torch itself: transforms of functions, checkpoints, hooks, parametrizations,
averages of weights, and steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.utils import parametrizations, prune
from torch.optim import swa_utils
from torch.utils import checkpoint

from networks.oracle import Network, all_exact, all_refused

PACKAGE = "torch"
STATES, IMAGES = (21, 6), (2, 3, 24, 16)


def mlp(_: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def convolutions(_: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))


def of_states(call: Callable[[Any, Tensor], Any], make: Callable[[Any], nn.Module] = mlp, **options: Any) -> Network:
    return Network(make, STATES, 0, call=call, **{"reduced": 300.0, **options})


def of_images(
    call: Callable[[Any, Tensor], Any], make: Callable[[Any], nn.Module] = convolutions, **options: Any
) -> Network:
    return Network(make, IMAGES, call=call, **{"train": True, "reduced": 30.0, **options})


# -- transforms of functions -------------------------------------------------------------------------------------------


def squares(network: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: network(x).square().sum()


def product(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    result, pull_back = vjp(network, x)
    return result, pull_back(result)[0]


def per_sample(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the weights for each row, which make up a dict."""
    loss = lambda weights, row: functional_call(network, weights, (row[None],)).square().sum()  # noqa: E731
    gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0))(dict(network.named_parameters()), x)
    return gradients


def ensemble(network: nn.Module, x: Tensor) -> Any:
    weights = {name: torch.stack([p, p * 0.5]) for name, p in network.named_parameters()}
    return vmap(lambda each, x: functional_call(network, each, (x,)), in_dims=(0, None))(weights, x)


TRANSFORMS = {
    "vmap": of_states(lambda network, x: vmap(network)(x)),
    "vmap in chunks": of_states(lambda network, x: vmap(network, chunk_size=4)(x)),
    "vmap over features": of_states(lambda _, x: vmap(lambda column: column.sin().cumsum(0), in_dims=1, out_dims=1)(x)),
    "vmap of grad": of_states(lambda network, x: vmap(grad(squares(network)))(x)),
    "vmap of jvp": of_states(lambda network, x: vmap(lambda row: jvp(network, (row,), (row.cos(),))[1])(x)),
    "vmap of jacrev": of_states(lambda network, x: vmap(jacrev(network))(x)),
    "vmap of jacfwd": of_states(lambda network, x: vmap(jacfwd(network))(x)),
    "vmap of hessian": of_states(lambda network, x: vmap(hessian(lambda row: network(row).sum()))(x)),
    "jvp": of_states(lambda network, x: jvp(network, (x,), (x.cos(),))),
    "jvp of grad": of_states(lambda network, x: jvp(grad(squares(network)), (x,), (x.sin(),))[1]),
    "vjp": of_states(product),
    "jacrev": of_states(lambda network, x: jacrev(lambda x: network(x).sum(0))(x)),
    "grad_and_value": of_states(lambda network, x: grad_and_value(lambda x: network(x).square().mean())(x)),
    "functional_call": of_states(
        lambda network, x: functional_call(network, {name: p * 2 for name, p in network.named_parameters()}, (x,))
    ),
    "gradients of each row": of_states(per_sample),
    "ensemble": of_states(ensemble),
    "linearize": of_states(lambda network, x: linearize(network, x)[1](x.cos())),
}
REFUSED = {"linearize": r"torch\.func\.linearize: .*Remedy: call torch\.func\.jvp with each tangent"}

# -- checkpoints and hooks ---------------------------------------------------------------------------------------------


def selected(network: nn.Module, x: Tensor) -> Any:
    """Convolutions are kept, all else is computed again."""
    contexts = partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.convolution.default])
    return checkpoint.checkpoint(network, x, use_reentrant=False, context_fn=contexts)


def on_cpu(network: nn.Module, x: Tensor) -> Any:
    with graph.save_on_cpu():
        return network(x)


def saved(network: nn.Module, x: Tensor) -> Any:
    with graph.saved_tensors_hooks(lambda tensor: (tensor, tensor.shape), lambda packed: packed[0]):
        return network(x)


def hooked(network: Any, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    hook = network[0].register_forward_hook(lambda layer, given, result: seen.append(result.mean()))
    result = network(x)
    hook.remove()
    result.register_hook(lambda gradient: gradient * 2)
    return [result, *seen]


def autocast(network: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return network(x).float()


WRAPPED = {
    **{
        f"checkpoint{kind}": of_images(partial(checkpoint.checkpoint, use_reentrant=reentrant))
        for kind, reentrant in (("", False), (", reentrant", True))
    },
    "checkpoint_sequential": of_images(
        lambda network, x: checkpoint.checkpoint_sequential(network, 2, x, use_reentrant=False)
    ),
    "checkpoint, selective": of_images(selected),
    "save_on_cpu": of_images(on_cpu),
    "hooks of saved tensors": of_images(saved, train=False),
    "hooks": of_images(hooked, train=False),
    "autocast": of_images(autocast, dtype=torch.float32, tolerance=2e-2),  # a few roundings to bfloat16
}

# -- weights -----------------------------------------------------------------------------------------------------------


def pruned(_: Any) -> nn.Module:
    layer = nn.Conv2d(3, 4, 3)
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


def trained(network: nn.Module, x: Tensor, step: Callable[[Tensor, torch.optim.Optimizer], None]) -> Any:
    optimizer = torch.optim.AdamW(network.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        step(network(x.detach()).square().mean(), optimizer)
    optimizer.zero_grad()
    return network(x)


def averaged(network: nn.Module, x: Tensor) -> Any:
    average = swa_utils.AveragedModel(network, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        loss.backward()
        optimizer.step()
        average.update_parameters(network)

    trained(network, x, step)
    return average(x)


def scaled(network: nn.Module, x: Tensor) -> Any:
    """Scaled gradients, clipped by their norm."""
    scaler = torch.amp.GradScaler("cpu")

    def step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return trained(network, x, step)


def searched(network: nn.Module, x: Tensor) -> Any:
    """Steps along lines, as far as losses on the way tell."""
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = network(x.detach()).square().mean()
        loss.backward()
        return float(loss)

    optimizer.step(closure)
    optimizer.zero_grad()
    return network(x)


def called(network: nn.Module, x: Tensor) -> Any:
    return network(x)


WEIGHTS = {
    "orthogonal": of_states(called, lambda _: parametrizations.orthogonal(nn.Linear(6, 6))),
    "weight_norm": of_images(called, lambda _: parametrizations.weight_norm(nn.Conv2d(3, 4, 3))),
    "spectral_norm": of_images(called, lambda _: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))),
    "pruned": of_images(called, pruned),
    "AveragedModel": of_images(averaged),
    "GradScaler": of_images(scaled),
    "LBFGS": of_states(searched, tolerance=1e-7),
}
NETWORKS = {**TRANSFORMS, **WRAPPED, **WEIGHTS}


test_networks_are_exact = all_exact(__name__, [n for n in NETWORKS if n not in REFUSED], always=("vmap of grad",))
test_refusals_say_what_to_do = all_refused(__name__, REFUSED)

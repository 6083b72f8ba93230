"""Losses and heads of lightly, for images without labels: of a batch that is cut, so that pairs are of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact, text
from networks.programs import load

PACKAGE = "lightly.loss"
pytest.importorskip(PACKAGE)

BATCH = (16, 12)


class Embedded(nn.Module):
    """A loss of embeddings of a batch, for which ``call`` makes the views."""

    def __init__(self, loss: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.embed, self.loss, self.call = nn.Linear(12, 12), loss, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.loss, self.embed, x)


def loss(make: Callable[[Any], nn.Module], call: Callable[..., Any], **options: Any) -> Network:
    options = {"tolerance": 1e-10, "reduced": 100.0, **options}
    return Network(lambda package: Embedded(make(package), call), BATCH, 0, **options)


def of_pairs(loss: nn.Module, embed: nn.Module, x: Tensor) -> Any:
    return loss(embed(x), embed(x.flip(0)))


def of_views(loss: nn.Module, embed: nn.Module, x: Tensor) -> Any:
    return loss([embed(x), embed(x.sin())])


def of_student_and_teacher(_: nn.Module, embed: nn.Module, x: Tensor) -> Any:
    """With a loss for this call alone: it assigns its new center to ``center.data``, of a plain tensor, where torch
    copies the fields of any tensor and asks none."""
    from lightly.loss import DINOLoss

    loss = DINOLoss(output_dim=12).double()
    return loss([embed(x).detach(), embed(x.sin()).detach()], [embed(x), embed(x.cos())], epoch=1)


def of_patches(loss: nn.Module, embed: nn.Module, x: Tensor) -> Any:
    return loss(embed(x).detach(), embed(x), mask=torch.ones(2, 2, 4, dtype=torch.bool))


def head(name: str, *sizes: int) -> Network:
    def make(_: Any) -> nn.Module:
        from lightly.models.modules import heads

        projection: nn.Module = getattr(heads, name)(*sizes)
        return projection

    return Network(make, BATCH, 0, train=True, tolerance=1e-10, reduced=100.0)


NETWORKS = {
    "DINOLoss": loss(lambda _: nn.Identity(), of_student_and_teacher),
    "SwaVLoss": loss(
        lambda p: p.SwaVLoss(), lambda loss, embed, x: loss([embed(x), embed(x.sin())], [embed(x.cos())])
    ),
    "MSNLoss": loss(
        lambda p: p.MSNLoss(),
        lambda loss, embed, x: loss(embed(x), embed(x.sin()).detach(), prototypes=text(5, 12)),
    ),
    "MMCRLoss": loss(
        lambda p: p.MMCRLoss(),
        lambda loss, embed, x: loss(embed(x).view(8, 2, 12), embed(x.sin()).view(8, 2, 12)),
    ),
    "KoLeoLoss": loss(lambda p: p.KoLeoLoss(), lambda loss, embed, x: loss(embed(x))),
    "WMSELoss": loss(
        lambda p: p.wmse_loss.WMSELoss(embedding_dim=8, w_size=16),
        lambda loss, embed, x: loss(embed(torch.cat([x, x.sin()]))[:, :8]),
        tolerance=1e-8,
    ),
    "EMPSSLLoss": loss(
        lambda p: p.emp_ssl_loss.EMPSSLLoss(),
        lambda loss, embed, x: loss([embed(x), embed(x.sin()), embed(x.cos())]),
    ),
    "FroSSLLoss": loss(lambda p: p.frossl_loss.FroSSLLoss(), of_views),
    "DirectCLRLoss": loss(lambda p: p.directclr_loss.DirectCLRLoss(loss_dim=6), of_pairs),
    "SIGReg": loss(lambda p: p.lejepa_loss.SIGReg(num_vectors=8), lambda loss, embed, x: loss(embed(x)[None])),
    "HypersphereLoss": loss(lambda _: load("lightly.loss.hypersphere_loss").HypersphereLoss(), of_pairs),
    "MACLLoss": loss(lambda p: p.macl_loss.MACLLoss(), of_pairs),
    "DCLWLoss": loss(lambda p: p.DCLWLoss(), of_pairs),
    "NTXentLoss, memory": loss(lambda p: p.NTXentLoss(memory_bank_size=(7, 12)), of_pairs),
    "NegativeCosineSimilarity, pairs": loss(lambda p: p.NegativeCosineSimilarity(), of_pairs),
    "IBOTPatchLoss": loss(lambda p: p.IBOTPatchLoss(output_dim=12), of_patches),
    "SimCLRProjectionHead": head("SimCLRProjectionHead", 12, 16, 8),
    "BYOLPredictionHead": head("BYOLPredictionHead", 12, 16, 8),
    "SwaVProjectionHead": head("SwaVProjectionHead", 12, 16, 8),
    "DINOProjectionHead": head("DINOProjectionHead", 12, 16, 8, 10),
    "VICRegProjectionHead": head("VICRegProjectionHead", 12, 16, 8),
}


test_losses_and_heads_are_exact = all_exact(__name__, NETWORKS, ["KoLeoLoss"])

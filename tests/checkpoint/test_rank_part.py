"""Checkpoints of ShardTensors: written with one cut, mesh and world size, read with another."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from shardtensor import ShardTensor
from shardtensor.testing import run_distributed, run_expecting_errors, shard, shared_mesh

SHAPE = (7, 5)


def numbers(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed))


# (mesh, placements, sizes)
CUTS = {
    "uneven": (2, [Shard(0)], {0: (6, 1)}),
    "other dim": (2, [Shard(1)], {0: (1, 4)}),
    "empty": (3, [Shard(0)], {0: (0, 7, 0)}),
    "even": (3, [Shard(0)], None),
    "two dims": ((2, 2), [Shard(0), Shard(1)], {0: (5, 2), 1: (5, 0)}),
    "replicated too": ((2, 2), [Replicate(), Shard(1)], {1: (2, 3)}),
    "four": (4, [Shard(0)], {0: (1, 3, 0, 3)}),
    "whole": (1, [Replicate()], None),
}
WORLDS = {name: (cut[0] if isinstance(cut[0], int) else 4) for name, cut in CUTS.items()}


def state(name, whole):
    mesh_shape, placements, sizes = CUTS[name]
    return {"x": shard(whole, shared_mesh(mesh_shape), placements, sizes), "step": 3}


def save(name, folder):
    dcp.save(state(name, numbers(*SHAPE)), checkpoint_id=folder)


def load(name, folder):
    found = state(name, torch.zeros(SHAPE, dtype=torch.float64))
    dcp.load(found, checkpoint_id=folder)
    assert type(found["x"]) is ShardTensor and found["step"] == 3
    assert found["x"].shard_sizes == state(name, numbers(*SHAPE))["x"].shard_sizes
    assert torch.equal(found["x"].full_tensor(), numbers(*SHAPE))


def load_plain(folder):
    found = {"x": torch.zeros(SHAPE, dtype=torch.float64)}
    dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["x"], numbers(*SHAPE))


@pytest.mark.parametrize("written", ["uneven", "empty", "two dims", "replicated too", "four"])
def test_any_cut_reads_what_any_other_has_written(written, tmp_path):
    run_distributed(save, WORLDS[written], written, str(tmp_path))
    for read in CUTS:
        run_distributed(load, WORLDS[read], read, str(tmp_path))
    run_distributed(load_plain, 1, str(tmp_path))


def save_dtensor(folder):
    dcp.save({"x": distribute_tensor(numbers(*SHAPE), shared_mesh(2), [Shard(0)]), "step": 3}, checkpoint_id=folder)


def test_dtensors_become_shardtensors(tmp_path):
    run_distributed(save_dtensor, 2, str(tmp_path))
    run_distributed(load, 3, "empty", str(tmp_path))


class Net(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.table = nn.Parameter(state(cut, numbers(*SHAPE))["x"])
        self.linear = nn.Linear(5, 2)


def trained(cut):
    torch.manual_seed(0)
    net = Net(cut).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net.linear(net.table).square().mean().backward()
        optimizer.step()
    return net, optimizer


def states(net, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


def save_training(cut, folder):
    dcp.save(states(*trained(cut)), checkpoint_id=folder)


def load_training(cut, folder):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    expected, expected_optimizer = trained(cut)
    torch.manual_seed(1)
    net = Net(cut).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    found = states(net, optimizer)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    for mine, other in ((net, expected),):
        for p, q in zip(mine.parameters(), other.parameters()):
            p, q = (t.full_tensor() if isinstance(t, ShardTensor) else t for t in (p, q))
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    moments = optimizer.state[net.table]["exp_avg"], expected_optimizer.state[expected.table]["exp_avg"]
    assert moments[0].shard_sizes == net.table.shard_sizes
    torch.testing.assert_close(moments[0].full_tensor(), moments[1].full_tensor(), rtol=1e-10, atol=1e-12)


def test_models_and_optimizers_move_between_cuts(tmp_path):
    run_distributed(save_training, 2, "uneven", str(tmp_path))
    run_distributed(load_training, 3, "empty", str(tmp_path))
    run_distributed(load_training, 3, "even", str(tmp_path))
    run_distributed(load_training, 4, "two dims", str(tmp_path))
    run_distributed(load_training, 1, "whole", str(tmp_path))


@on_ranks(2)
def test_weights_only_loading():
    kept = io.BytesIO()
    x = state("uneven", numbers(*SHAPE))["x"]
    torch.save({"x": x, "p": nn.Parameter(x)}, kept)
    kept.seek(0)
    found = torch.load(kept, weights_only=True)
    assert found["x"].shard_sizes == {0: (6, 1)} and isinstance(found["p"], nn.Parameter)
    assert torch.equal(found["x"].to_local(), x.to_local())


def save_own(folder):
    torch.save(state("uneven", numbers(*SHAPE)), f"{folder}/{dist.get_rank()}.pt")


def load_other(folder):
    loaded = torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=True)
    assert torch.equal(loaded["x"].full_tensor(), numbers(*SHAPE))
    torch.load(f"{folder}/{1 - dist.get_rank()}.pt", weights_only=True)


def load_alone(folder):
    torch.load(f"{folder}/0.pt", weights_only=True)


def test_the_shard_of_another_rank_is_not_loaded(tmp_path):
    run_distributed(save_own, 2, str(tmp_path))
    for rank, error in enumerate(run_expecting_errors(load_other, 2, str(tmp_path))):
        text = f"the shard of rank {1 - rank} on a mesh of the ranks [0, 1], and it is loaded on rank {rank} of 2"
        assert isinstance(error, ValueError) and text in str(error)
    [error] = run_expecting_errors(load_alone, 1, str(tmp_path))
    assert "the shard of rank 0 on a mesh of the ranks [0, 1], and it is loaded on rank 0 of 1" in str(error)


@pytest.mark.not_emulated("the program that loads has no device")
def test_a_program_without_shardtensor_is_told_to_import_it(tmp_path):
    run_distributed(save_own, 2, str(tmp_path))
    code = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"
    command = [sys.executable, "-c", code, str(tmp_path / "0.pt")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "tensor.import_shardtensor_first" in found.stderr and found.returncode
    assert torch.load(tmp_path / "0.pt", weights_only=True)["x"].to_local().shape == (6, 5)


def save_partial(folder):
    dcp.save({"x": shard(numbers(*SHAPE), shared_mesh(2), [Partial()])}, checkpoint_id=folder)


def test_partials_are_refused(tmp_path):
    for error in run_expecting_errors(save_partial, 2, str(tmp_path)):
        assert error is not None and "Partial has no shards to write" in str(error)


def export(path):
    safetensors = pytest.importorskip("safetensors.torch")
    net = Net("uneven")
    whole = {name: t.full_tensor() if isinstance(t, ShardTensor) else t for name, t in net.state_dict().items()}
    if torch.distributed.get_rank() == 0:
        safetensors.save_file(whole, path)
        found = safetensors.load_file(path)
        assert torch.equal(found["table"], numbers(*SHAPE).cpu())


def test_safetensors_hold_whole_tensors(tmp_path):
    pytest.importorskip("safetensors")
    run_distributed(export, 2, str(tmp_path / "x.safetensors"))


@on_ranks(2)
def test_models_save_full_parameters_and_restore_their_sharding():
    """A model whose convolution is plain and whose embedding is sharded.

    The full state dict is that of one device; loading it keeps placements and sizes.
    """
    torch.manual_seed(0)
    mesh = shared_mesh(2)
    plain = nn.ParameterDict({"table": nn.Parameter(numbers(1, 8, 3)), "weight": nn.Parameter(numbers(3, 3))})
    sharded = nn.ParameterDict(
        {"table": nn.Parameter(shard(numbers(1, 8, 3), mesh, [Shard(1)], {0: (5, 3)})), "weight": plain["weight"]}
    )
    full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert type(full[name]) is torch.Tensor
        torch.testing.assert_close(full[name], value, rtol=0, atol=0)
    # and back into the placements and sizes that the model has
    doubled = {name: 2 * value for name, value in full.items()}
    set_model_state_dict(sharded, doubled, options=StateDictOptions(full_state_dict=True))
    assert sharded["table"].shard_sizes == {0: (5, 3)} and sharded["table"].placements == (Shard(1),)
    torch.testing.assert_close(sharded["table"].full_tensor(), 2 * numbers(1, 8, 3), rtol=0, atol=0)
    # a checkpoint of shards keeps the cut
    kept = io.BytesIO()
    torch.save(sharded.state_dict(), kept)
    kept.seek(0)
    again = torch.load(kept, weights_only=False)["table"]
    assert again.shard_sizes == {0: (5, 3)}
    torch.testing.assert_close(again.full_tensor(), 2 * numbers(1, 8, 3), rtol=0, atol=0)

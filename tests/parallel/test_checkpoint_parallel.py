"""Checkpoints of models under FSDP2 and a domain: written on one mesh, trained on from another, or from none.

Whoever reads one takes a further step; its weights must be those of one process that never stopped.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_parallel import (
    AXES,
    CUTS,
    HEAD,
    Embedded,
    Network,
    adamw,
    check,
    inputs,
    needs_spmd,
    problem,
    train,
    train_alone,
    whole,
)
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

from shardtensor.checkpoint import CheckpointReader, CheckpointWriter
from shardtensor.parallel import parallelize
from shardtensor.testing import run_distributed, shard, shared_mesh

FULL = StateDictOptions(full_state_dict=True)
CUTS3 = {**CUTS, 3: (3, 13, 0)}

# name: (mesh, options of parallelize); None: plain PyTorch in one process
MESHES = {
    "2x2": ((2, 2), {}),
    "1x3": ((1, 3), {}),
    "1x2": ((1, 2), {}),
    "2x1": ((2, 1), {}),
    "2x2 sharded over all": ((2, 2), {"fsdp": AXES}),
    "2x2 spmd": ((2, 2), {"spmd": True, "fsdp": AXES}),
    "one process": None,
}


def ranks(name):
    return 1 if MESHES[name] is None else MESHES[name][0][0] * MESHES[name][0][1]


def build(name, model):
    """The model on that mesh, and what it is fed with."""
    if MESHES[name] is None:
        return model, problem()[1], problem()[2]
    shape, options = MESHES[name]
    mesh = shared_mesh(shape, AXES)
    if isinstance(model, Embedded):
        model.position = nn.Parameter(distribute_tensor(model.position.detach(), mesh["domain"], [Shard(1)]))
    parallelize(model, mesh, **options)
    if options.get("spmd") or shape[1] in CUTS:
        return model, *inputs(mesh, options.get("spmd", False))
    return model, shard(problem()[1], mesh["domain"], [Shard(2)], {0: CUTS3[shape[1]]}), problem()[2]


def fresh(kind):
    torch.manual_seed(7 + dist.get_rank())
    return kind().double()


def save(name, folder, kind):
    model, x, y = build(name, copy.deepcopy(problem(kind)[0]))
    optimizer = adamw(model)
    train(model, x, y, lambda _: optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=CheckpointWriter(folder))


def load(name, folder, kind):
    model, x, y = build(name, fresh(kind))
    optimizer = adamw(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=CheckpointReader(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, x, y, lambda _: optimizer, steps=1)
    check(model, train_alone(kind, adamw, steps=3)[0], rtol=1e-8)


def moved(written, read, folder, kind=Network):
    run_distributed(save, ranks(written), written, folder, kind)
    for name in read:
        run_distributed(load, ranks(name), name, folder, kind)


def test_two_by_two_ranks_to_others(tmp_path):
    """4 -> 3, 2 and 1; each with another cut of the sample and of the weights."""
    moved("2x2", ["1x3", "one process", "2x2 sharded over all"], str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("written", ["1x3", "2x2 sharded over all", pytest.param("2x2 spmd", marks=needs_spmd)])
def test_any_mesh_to_any_other(written, tmp_path):
    spmd = ["2x2 spmd"] if hasattr(fsdp, "DataParallelMeshDims") else []
    moved(written, ["2x2", "1x2", "2x1", "one process", *spmd], str(tmp_path))


def test_one_process_to_many(tmp_path):
    moved("one process", ["2x2", "1x3"], str(tmp_path))


def test_position_embeddings_that_are_cut_over_the_domain(tmp_path):
    """Over both axes on 2 x 2 ranks, over the other number of them on 1 x 2, whole in one process."""
    moved("2x2", ["1x2", "one process"], str(tmp_path), Embedded)


def full_state(path):
    """What rank 0 gets is the state dict of one process, and what every rank is given becomes its shards."""
    model, x, y = build("2x2", copy.deepcopy(problem(Embedded)[0]))
    optimizer = adamw(model)
    train(model, x, y, lambda _: optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        expected = train_alone(Embedded, adamw, steps=2)[0]
        assert state.keys() == expected.keys()
        for key, weight in expected.items():
            assert type(state[key]) is torch.Tensor
            torch.testing.assert_close(
                state[key], weight.detach().cpu(), rtol=1e-8, atol=1e-10, msg=f"{key}: {{}}".format
            )
        torch.save({"model": state, "optimizer": moments}, path)
    dist.barrier()
    kept = torch.load(path, weights_only=True)
    again, x, y = build("2x2", fresh(Embedded))
    optimizer = adamw(again)
    set_model_state_dict(again, kept["model"], options=FULL)
    set_optimizer_state_dict(again, optimizer, kept["optimizer"], options=FULL)
    for p, q in zip(model.parameters(), again.parameters()):
        assert p.placements == q.placements and torch.equal(p.to_local(), q.to_local())
    train(again, x, y, lambda _: optimizer, steps=1)
    check(again, train_alone(Embedded, adamw, steps=3)[0], rtol=1e-8)


def test_full_state_dicts_are_those_of_one_process(tmp_path):
    """Of model and optimizer; written and read with ``weights_only``."""
    run_distributed(full_state, 4, str(tmp_path / "state.pt"))


def exported(path):
    from safetensors.torch import load_file, save_file

    model, *_ = build("2x2", copy.deepcopy(problem(Embedded)[0]))
    state = {key: whole(value) for key, value in model.state_dict().items()}  # on all ranks
    if dist.get_rank() == 0:
        save_file(state, path)
        alone = problem(Embedded)[0].state_dict()
        found = load_file(path)
        assert found.keys() == alone.keys() and all(torch.equal(found[key], alone[key].cpu()) for key in alone)


def test_safetensors_of_a_sharded_model(tmp_path):
    pytest.importorskip("safetensors")
    run_distributed(exported, 4, str(tmp_path / "model.safetensors"))


def save_three_axes(folder):
    mesh = shared_mesh((2, 2, 2), ("dp", "domain", "tp"))
    model = copy.deepcopy(problem()[0])
    parallelize(model, mesh, tensor="tp", plan=HEAD)
    optimizer = adamw(model)
    train(model, *inputs(mesh, False, tensor=True), lambda _: optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=CheckpointWriter(folder))


@pytest.mark.slow
def test_three_axes_to_others(tmp_path):
    """Rows that are cut over two mesh dims are found again."""
    run_distributed(save_three_axes, 8, str(tmp_path))
    for name in ("2x2", "one process"):
        run_distributed(load, ranks(name), name, str(tmp_path), Network)

"""What would take values or memory out of torch is refused; numbers are formatted."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from alike import raises_alike
from on_ranks import on_ranks
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import Shard
from torch.utils.data import default_collate

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh


class Other(torch.Tensor):
    """Of another package."""


def written(x):
    made = torch.zeros(6)
    made[:] = x
    return made


OUT = {
    "numpy": (lambda x: x.numpy(), "numpy: no rank holds all values"),
    "array": (lambda x: np.array(x), "__array__: no rank holds all values"),
    "numpy.mean": (lambda x: np.mean(x), "(?=.*torch's function)__array__: no rank holds all values"),
    "numpy.sqrt": (lambda x: np.sqrt(x), "(?=.*torch's function)__array__: no rank holds all values"),
    "tolist": (lambda x: x.tolist(), "tolist: no rank holds all values"),
    "torch.from_dlpack": (lambda x: torch.from_dlpack(x), "no memory of its own"),
    "numpy.from_dlpack": (lambda x: np.from_dlpack(x), "no memory of its own"),
    "to_dlpack": (lambda x: torch.utils.dlpack.to_dlpack(x), "to_dlpack: no distributed form"),
    "torch.to_dlpack": (lambda x: torch.to_dlpack(x), "to_dlpack: no distributed form"),
    "apply_": (lambda x: x.apply_(lambda v: v + 1), "apply_: a ShardTensor has no memory"),
    "as_subclass": (lambda x: x.as_subclass(Other), "as_subclass: a ShardTensor cannot be of class Other, too"),
    "data_ptr": (lambda x: x.data_ptr(), "data_ptr: a ShardTensor has no memory"),
    "const_data_ptr": (lambda x: x.const_data_ptr(), "const_data_ptr: a ShardTensor has no memory"),
    "untyped_storage": (lambda x: x.untyped_storage(), "untyped_storage: a ShardTensor has no memory"),
    "_typed_storage": (lambda x: x._typed_storage(), "untyped_storage: a ShardTensor has no memory"),
    "storage": (lambda x: x.storage(), "storage: a ShardTensor has no memory"),
    "storage_offset": (lambda x: x.storage_offset(), "storage_offset: a ShardTensor has no memory"),
    "set_": (lambda x: torch.empty(0).set_(x.untyped_storage()), "untyped_storage: a ShardTensor has no memory"),
    "safetensors": (lambda x: pytest.importorskip("safetensors.torch").save({"x": x}), "data_ptr: a ShardTensor has"),
    "written": (lambda x: written(x).data_ptr(), "data_ptr: a ShardTensor has no memory"),
    "map_": (lambda x: x.map_(x, lambda a, b: a), "map_: a ShardTensor has no memory"),
}


def numbers():
    return shard(torch.arange(6.0), shared_mesh(2), [Shard(0)], {0: (4, 2)})


if not hasattr(torch.Tensor, "const_data_ptr"):  # new in torch 2.13
    del OUT["const_data_ptr"]
REMEDY = r".*\[4, 2\].*Remedy: .*to_local\(\)"
ERRORS = {name: (function, UnsupportedSharding, text + REMEDY) for name, (function, text) in OUT.items()}


@pytest.mark.parametrize("name", ERRORS)
def test_refused_on_every_rank(name):
    raises_alike(numbers, name)


def array_interface():
    x = numbers()
    if x.device.type == "cpu":  # plain tensors have none either
        return not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(UnsupportedSharding, match="a ShardTensor has no memory"):
        x.__cuda_array_interface__  # noqa: B018
    return True


@pytest.mark.on_device
def test_no_address_for_arrays_on_devices():
    assert all(run_distributed(array_interface, 2))


@pytest.mark.on_cpu("it is offloaded there")
@on_ranks(2)
def test_torch_itself_may_ask_for_storages():
    """Of storages and addresses: modules of torch's that tell tensors apart by them."""
    whole = torch.arange(6.0)
    for x in (numbers(), written(numbers())):
        assert not x.is_shared() and torch.equal(default_collate([x, x]).full_tensor(), torch.stack([whole, whole]))
        staged = StateDictStager(pin_memory=False, share_memory=False).stage({"x": x})["x"]
        offloaded = _offload_state_dict_to_cpu({"x": x})["x"]
        pickled = pickle.loads(pickle.dumps(x))
        for y in (staged, offloaded, copy.deepcopy(x), pickled):
            assert isinstance(y, ShardTensor) and torch.equal(y.full_tensor(), whole)
        buffer = io.BytesIO()
        torch.save(x, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer).full_tensor(), whole)
    leaf = numbers().requires_grad_()
    with allow_mutation_on_saved_tensors(), MemTracker():
        y = leaf * 1
        z = y.sin()
        y.add_(1)
        z.sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), whole.cos())


@on_ranks(2)
def test_a_sharded_tensor_is_a_tensor():
    x = numbers()
    y = x.as_subclass(torch.Tensor)
    y.add_(1)
    assert type(y) is type(x) and torch.equal(x.full_tensor(), torch.arange(6.0) + 1)


@on_ranks(2)
def test_numbers_are_formatted_like_those_of_plain_tensors():
    x = numbers()
    loss = x.sum().requires_grad_()
    assert (f"{loss:.2f}", f"{x.mean():>6.1f}", f"{(x > 1).sum():d}") == ("15.00", "   2.5", "4")


@pytest.mark.on_cpu("torch makes no arrays of tensors on devices")
@on_ranks(2)
def test_one_element_is_read_as_item_reads_it():
    x = numbers()
    mean = x.mean()
    assert mean.tolist() == mean.detach().cpu().numpy().item() == np.asarray(mean).item() == 2.5
    assert x[4:5].tolist() == [4.0]  # on the second rank


def gathered():
    x = numbers()
    with shardtensor.allow_gather():
        return x.numpy().tolist() == x.full_tensor().tolist()


@pytest.mark.on_cpu("torch makes no arrays of tensors on devices")
def test_an_array_of_what_is_gathered():
    assert all(run_distributed(gathered, 2))


def reduced():
    x = shard(torch.arange(24.0).view(2, 3, 4), shared_mesh(2), [Shard(2)], {0: (3, 1)})
    sums, greatest = x.sum((1, 2)), x.amax((1, 2))
    mean = x.mean()
    with count_communication() as counted:
        lists = [sums.tolist(), sums.numpy().tolist(), np.asarray(greatest).tolist()]
    assert counted.collectives["all_reduce"] == 3 and counted.bytes_sent < 1000  # with what the ranks compare
    lists += [np.mean(sums).item(), np.max(sums, axis=0).item(), np.stack([mean, mean]).tolist(), np.std(mean).item()]
    return [*lists, np.squeeze(x).shape == x.shape and np.ndim(x) == 3]


@pytest.mark.on_cpu("torch makes no arrays of tensors on devices")
def test_what_is_not_sharded_is_reduced():
    """As torch has it of plain tensors: numpy.mean(tensor) raises there, as its mean has other arguments."""
    sums = [66.0, 210.0]
    found = [sums, sums, [11.0, 23.0], 138.0, 210.0, [11.5, 11.5], 0.0, True]
    assert run_distributed(reduced, 2) == [found] * 2


@on_ranks(2)
def test_a_tensor_is_made_of_numbers():
    x = numbers()
    loss, wrong = x.mean().requires_grad_(), (x > 1).sum()
    tensors = torch.tensor([loss, wrong]), torch.tensor([wrong, x.max().int()]), torch.tensor([[loss], [x[5]]])
    flags = torch.tensor([(x > 4).any(), (x > 9).any()]), torch.tensor([loss + 1j])
    assert all(type(t) is torch.Tensor for t in (*tensors, *flags))
    with pytest.raises(ValueError, match="only one element"):
        torch.tensor([x, x])
    expected = [[2.5, 4.0], [4, 5], [[2.5], [5.0]], [True, False], [2.5 + 1j]]
    assert [t.tolist() for t in (*tensors, *flags)] == expected

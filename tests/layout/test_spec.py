"""The spec: sizes, what is where, equality and hash; on simulated ranks, without processes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensorSpec
from shardtensor.layout.placements import AxisLayout
from shardtensor.testing import shared_mesh, simulate_ranks


def make(mesh_shape, placements, shape, **kwargs):
    return ShardTensorSpec.make(shared_mesh(mesh_shape), placements, shape, torch.float32, **kwargs)


def where_is_what():
    spec = make((2, 3), [Shard(1), Shard(-1)], (4, 8, 7), shard_sizes={0: (5, 3), 1: (0, 6, 1)})
    return {
        "sizes": spec.sizes,
        "dict": spec.shard_sizes,
        "dims": spec.sharded_dims(),
        "local": spec.local_shape(),
        "there": spec.local_shape((1, 1)),
        "intervals": (spec.interval(0), spec.interval(1)),
        "coordinate": spec.coordinate,
        "shapes": spec.sharding_shapes(),
    }


def test_every_rank_knows_what_every_other_holds():
    results = simulate_ranks(where_is_what, 6)
    first, last = results[0], results[5]
    for result in results:
        assert result["sizes"] == ((5, 3), (0, 6, 1))
        assert result["dict"] == {0: (5, 3), 1: (0, 6, 1)}
        assert result["dims"] == {1: 0, 2: 1}
        assert result["there"] == (4, 3, 6)
    assert (first["coordinate"], last["coordinate"]) == ((0, 0), (1, 2))
    assert (first["local"], last["local"]) == ((4, 5, 0), (4, 3, 1))
    assert (first["intervals"], last["intervals"]) == (((0, 5), (0, 0)), ((5, 8), (6, 7)))
    # A dict by mesh dim: the shapes along it, at this rank's place on the other mesh dims.
    assert last["shapes"] == {0: ((4, 5, 1), (4, 3, 1)), 1: ((4, 3, 0), (4, 3, 6), (4, 3, 1))}


def defaults():
    even = make(3, [Shard(0)], (7, 2))
    return (
        even.sizes,
        make(3, [Shard(0)], (7, 2), shard_sizes="even") == even,
        make(3, [Shard(0)], (2, 2)).sizes,
        make((1, 3), [Shard(0), Replicate()], (7, 2)).sizes,
        make((1, 3), [Shard(1), Shard(0)], (7, 2), shard_sizes={-1: (1, 1, 5)}).sizes,
        make(3, [Partial()], (7,)).sizes,
        even.tensor_meta.stride,
    )


def test_sizes_that_are_not_given_are_those_of_torch_chunk():
    ((first, *rest),) = simulate_ranks(defaults, 3, only=[0])
    assert first == ((3, 3, 1),)
    assert rest == [True, ((1, 1, 0),), ((7,), None), ((2,), (1, 1, 5)), (None,), (2, 1)]


CUT = (Shard(0),)


def compare():
    def spec(sizes=(5, 3), shape=(8, 4), placements=CUT, dtype=torch.float32, stride=None):
        mesh = shared_mesh(2)
        given = {0: sizes} if placements[0] == Shard(0) else None
        return ShardTensorSpec.make(mesh, placements, shape, dtype, shard_sizes=given, stride=stride)

    base = spec()
    same = copy.copy(base)
    others = [
        spec(sizes=(4, 4)),
        spec(sizes=(3, 5)),
        spec(shape=(8, 5)),
        spec(placements=(Replicate(),)),
        spec(placements=(Partial(),)),
        spec(dtype=torch.float64),
        spec(stride=(1, 8)),
    ]
    assert base is not same and base == same and hash(base) == hash(same)
    for other in others:
        assert base != other and len({base, other}) == 2
        assert base._stable_hash() != other._stable_hash()
    assert base._stable_hash() == same._stable_hash()
    assert base != base.__class__.__mro__[1](base.mesh, base.placements, base.tensor_meta)  # DTensor's own spec
    assert spec() is base and base.replace(placements=base.placements) is base
    assert base.coordinate == (1,) and "coordinate" not in vars(copy.copy(base))  # another rank's is another
    return True


def test_sizes_are_part_of_equality_and_hash():
    assert simulate_ranks(compare, 2, only=[1]) == [True]


def derived():
    spec = make((2, 2), [Shard(0), Partial()], (8, 4), shard_sizes={0: (7, 1)})
    gradient, whole = spec.for_gradient(), spec.replicated()
    assert gradient.placements == (Shard(0), Replicate()) and gradient.sizes == ((7, 1), None)
    assert gradient.for_gradient() is gradient
    assert spec.partial_mesh_dims() == [1]
    assert whole.is_replicate() and whole.sizes == (None, None) and not spec.is_replicate()
    assert spec.placements == (Shard(0), Partial())  # unchanged
    assert str(spec) == repr(spec) and "(8, 4) float32 on mesh (2, 2) as (S(0)[7, 1], P(sum))" in str(spec)
    return True


def test_derived_specs_and_text():
    assert simulate_ranks(derived, 4, only=[3]) == [True]


def layouts():
    spec = make((2, 2), [Shard(0), Replicate()], (8, 4), shard_sizes={0: (7, 1)})
    assert spec.layout == (AxisLayout(Shard(0), (7, 1)), AxisLayout(Replicate()))
    assert spec.with_layout(spec.layout) is spec
    traded = spec.with_axes({0: AxisLayout(Partial()), 1: AxisLayout(Shard(1), (3, 1))})
    assert traded.placements == (Partial(), Shard(1)) and traded.sizes == (None, (3, 1))
    assert traded.tensor_meta == spec.tensor_meta
    assert traded.with_axes({0: spec.layout[0], 1: spec.layout[1]}) is spec
    assert traded.with_axes({0: spec.layout[0]}).local_shape((0, 1)) == (7, 1)
    with pytest.raises(IndexError):
        spec.with_axes({2: AxisLayout(Replicate())})
    wider = spec.tensor_meta._replace(shape=torch.Size((8, 9)), stride=(9, 1))
    assert spec.with_layout(spec.layout, wider) is spec.replace(meta=wider)
    assert spec.for_contributions().layout == (spec.layout[0], AxisLayout(Partial()))
    return True


def test_a_layout_holds_placement_and_sizes_of_each_mesh_dim():
    assert simulate_ranks(layouts, 4, only=[1]) == [True]


BAD = [
    ([Shard(0)], (8,), {0: (5, 2)}, ValueError, r"\(5, 2\) of mesh dim 0 add up to 7, but tensor dim 0 has size 8"),
    ([Shard(0)], (8,), {0: (5, 2, 1)}, ValueError, "3 shard sizes .* mesh dim 0, which has 2 ranks"),
    ([Shard(0)], (8,), {0: (9, -1)}, ValueError, "negative shard size"),
    ([Shard(0)], (8,), {0: (5.7, 3.2)}, TypeError, "must be integers"),
    ([Shard(0)], (8,), {1: (5, 3)}, ValueError, r"names mesh dims \[1\], but the mesh has only 1"),
    ([Replicate()], (8,), {0: (5, 3)}, ValueError, "whose placement is R.*only Shard has sizes"),
    ([Shard(0)], (8,), "odd", ValueError, "a dict"),
    ([Shard(0)], (8,), [(5, 3)], TypeError, "must be integers"),
    ([Shard(0)], (8,), 8, TypeError, "must be sizes, a dict"),
    ([Shard(0)], (8,), {"lat": (5, 3)}, ValueError, "no axis 'lat'; its axes are called nothing"),
    ([Replicate()], (8,), (5, 3), ValueError, r"sizes alone need one mesh dim that shards; name the mesh dims"),
    ([Shard(1)], (8,), None, ValueError, r"Shard\(1\) on mesh dim 0: the tensor has only 1 dims"),
    ([Shard(-2)], (8,), None, ValueError, r"Shard\(-2\)"),
    ([Shard(0)], (), None, ValueError, "only 0 dims"),
    ([Shard(0), Shard(0)], (8,), None, ValueError, "2 placements .* for a mesh of 1 dims"),
    ([], (8,), None, ValueError, "0 placements"),
    (Shard(0), (8,), None, TypeError, "sequence with one entry per mesh dim"),
    ([0], (8,), None, TypeError, "is not a Placement"),
    ([Partial("avg")], (8,), None, ValueError, r"Partial\('avg'\) .* not exact on unequal shards"),
]


def all_bad_arguments():
    for placements, shape, sizes, kind, text in BAD:
        with pytest.raises(kind, match=text):
            make(2, placements, shape, shard_sizes=sizes)
    return True


def test_what_does_not_fit_is_refused_with_the_reason():
    assert simulate_ranks(all_bad_arguments, 2, only=[0]) == [True]


def one_dim_on_two_mesh_dims():
    with pytest.raises(ValueError, match="tensor dim 0 is sharded on mesh dims 0 and 1"):
        make((2, 2), [Shard(0), Shard(-2)], (8, 4))
    return True


def test_a_tensor_dim_is_sharded_once():
    assert simulate_ranks(one_dim_on_two_mesh_dims, 4, only=[0]) == [True]


def strided():
    from torch.distributed.tensor.placement_types import _StridedShard

    with pytest.raises(ValueError, match="strided shards are not supported; redistribute the DTensor first"):
        make((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (8, 4))
    return True


def test_strided_shards_are_refused():
    assert simulate_ranks(strided, 4, only=[0]) == [True]


def roundtrip():
    spec = make(2, [Shard(0)], (8, 4), shard_sizes={0: (7, 1)})
    hash(spec), spec.coordinate  # fill what is kept
    return pickle.loads(pickle.dumps(spec)) == spec


def test_specs_pickle():
    assert simulate_ranks(roundtrip, 2) == [True, True]


def out_of_order():
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [[0, 1], [3, 2]])
    with pytest.raises(ValueError, match=r"ranks \[\[0, 1\], \[3, 2\]\] do not ascend"):
        ShardTensorSpec.make(mesh, [Shard(0), Replicate()], (4,), torch.float32)
    return True


def test_ranks_of_a_mesh_ascend():
    """Process groups sort their ranks, so in another order a rank's place would not be its rank in the group."""
    assert simulate_ranks(out_of_order, 4) == [True] * 4


def targets():
    spec = make((2, 3), [Shard(0), Shard(1)], (8, 9), shard_sizes={0: (5, 3)})
    near = spec.target(None, {0: [4, 4]})
    assert near.sizes == ((4, 4), (3, 3, 3)) and near.placements == spec.placements
    assert spec.target(None, {0: (4, 4)}) is near and spec.target(None, {-2: (4, 4)}) is near
    turned = spec.target([Replicate(), Shard(-1)], None)
    assert turned.sizes == (None, (3, 3, 3)) and spec.target((Replicate(), Shard(1)), None) is turned
    assert spec.target(None, "even").sizes == ((4, 4), (3, 3, 3)) and spec.target(None, None) is spec
    mine = {1: [1, 2, 6]}
    assert spec.target(None, mine).sizes[1] == (1, 2, 6)
    mine[1][:2] = 2, 1  # of the caller, who may change them
    assert spec.target(None, mine).sizes[1] == (2, 1, 6)
    mine[0] = (8, 0)
    assert spec.target(None, mine).sizes == ((8, 0), (2, 1, 6))
    for _ in range(2):  # an error is not remembered as an answer
        with pytest.raises(ValueError, match="add up to 9"):
            spec.target(None, {0: (5, 4)})
        with pytest.raises(TypeError, match="a sequence with one entry per mesh dim"):
            spec.target(Shard(0), None)


def test_a_target_is_what_was_asked_for():
    simulate_ranks(targets, 6)

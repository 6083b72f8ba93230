"""flex_attention on shards against the unsharded one: functions of global indices, block masks, gradients, messages."""

from __future__ import annotations

import json
from functools import partial
from unittest import mock

import pytest
import torch
from alike import raises_alike
from on_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention import flex_attention as functions
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from shardtensor import ShardTensor, explain, timeline
from shardtensor._compat import flex_attention_operator
from shardtensor.errors import RanksDiffer
from shardtensor.layout.caches import forget
from shardtensor.ops.attention import online_softmax
from shardtensor.ops.attention.flex import FlexCall
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)

BATCH, HEADS, ROWS, WHOLE = [Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]


def score_mod(score, b, h, i, j, table):
    """Depends on all indices, and on a learned table."""
    return 3 * torch.tanh(score / 3) + (b + 1) * table[h, i - j]


def mask_mod(b, h, i, j, document):
    """Documents, causal in some heads: some rows see few keys, and some none."""
    return (document[b, i] == document[b, j]) & ((i >= j) | (h < 1)) & (i != 5)


def attend(q, k, v, table, document, block):
    """torch's operator, as torch's function calls it."""
    shape = len(q), q.shape[1], q.shape[2], k.shape[2]
    seen = create_block_mask(lambda b, h, i, j: mask_mod(b, h, i, j, document), *shape, q.device.type, block)
    mask = *seen.as_tuple()[:-1], mask_mod
    return flex_attention_operator(q, k, v, score_mod, mask, 0.3, {}, (table,), (document,))[:2]


def alike(*sizes):
    return [dict(enumerate(sizes))] * 3


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (
            2,
            [
                (33, 33, [ROWS] * 3, alike((20, 13)), 2, 16),
                (33, 17, [ROWS] * 3, [{0: (33, 0)}, {0: (3, 14)}, {0: (5, 12)}], 2, (8, 4), 4, 2, 1),
                (7, 17, [ROWS, WHOLE, WHOLE], None, 2, 8),
                (1, 17, [None, ROWS, ROWS], None, 2, 8),
                (33, 33, [BATCH] * 3, alike((1, 2)), 2, 16),
                (33, 33, [HEADS, None, None], None, 2, 16, 4, 2, 3),
            ],
        ),
        pytest.param(
            4,
            [
                (33, 33, [[Shard(2), Shard(0)]] * 3, alike((20, 13), (1, 2)), (2, 2), 16),
                (33, 33, [[Shard(1), Shard(2)]] * 3, alike((1, 3), (17, 16)), (2, 2), 16),
                (97, 97, [ROWS] * 3, alike((1, 50, 0, 46)), 4, 16),
                (2, 97, [ROWS] * 3, None, 4, 16),
                (97, 5, [WHOLE, ROWS, ROWS], [None, {0: (0, 5, 0, 0)}, {0: (1, 1, 1, 2)}], 4, 8),
                (33, 33, [BATCH] * 3, alike((3, 0, 0, 0)), 4, 16),
                (33, 33, [BATCH, WHOLE, WHOLE], None, 4, 16, 4, 4, 1),
                (128, 96, [ROWS] * 3, [{0: (64, 0, 32, 32)}, {0: (24,) * 4}, {0: (96, 0, 0, 0)}], 4, 32),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
@on_ranks("world", timeout=300)
def test_layouts(world, cases):
    for rows, keys, placements, sizes, mesh_shape, block, *heads in cases:
        q_heads, kv_heads, kv_batch = heads or (4, 4, 3)
        shapes = (3, q_heads, rows, 5), (kv_batch, kv_heads, keys, 5), (kv_batch, kv_heads, keys, 2)
        torch.manual_seed(0)
        q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        table = torch.randn(q_heads, rows + keys, dtype=torch.float64)
        document = torch.randint(3, (3, max(rows, keys))).sort(1).values
        try:
            assert_matches_unsharded(
                attend,
                *(q, k, v, table, document, block),
                mesh_shape=mesh_shape,
                placements=[*placements, [Replicate()] * len(placements[0] or WHOLE), None, None],
                shard_sizes=[*(sizes or [None] * 3), None, None, None],
                rtol=1e-10,
            )
        except Exception as error:
            raise AssertionError(f"{rows} x {keys}, {placements} {sizes}, blocks of {block}") from error


@on_ranks(3)
def test_blocks():
    """What kernels see of a mask: full blocks, and of others what its function says. Eager mode looks at no blocks."""
    document = torch.randint(3, (2, 97)).sort(1).values
    where = document.device

    def seen(b, h, i, j):
        return (document[b, i] == document[b, j]) & (i >= j)

    for sizes, axes in (((1, 50, 46), [Shard(2)]), ((64, 2, 31), [Shard(2)]), ((0, 1, 1), [Shard(0)])):
        query = shard(torch.empty(2, 1, 97, 4), shared_mesh(3), axes, {0: sizes})
        if not query.to_local().numel():
            continue
        mask = create_block_mask(seen, 2, 1, 97, 97, where, 16).as_tuple()
        own = create_mask(seen, 2, 1, 97, 97, where)[:, :, slice(*query._spec.own_interval(2))].nonzero()[:, -1]
        keys = int(own.min()) // 16 * 16, min(97, int(own.max()) // 16 * 16 + 16)
        part, before = FlexCall(lambda score, *_: score, mask, 1.0, {}, ((), ())).of_part(query._spec, keys)
        (start, _), (batch, end) = query._spec.interval(0), query.to_local().shape[::2]
        start, batches = (start, slice(None)) if axes == [Shard(2)] else (0, slice(start, start + batch))
        partly, entirely = (
            BlockMask.from_kv_blocks(*part.mask[at : at + 2], BLOCK_SIZE=16).to_dense().bool() for at in (2, 4)
        )
        n = keys[1] - keys[0]
        at = torch.arange(before + end)[:, None] // 16, torch.arange(n) // 16
        told = part.mask[-1]
        shown = create_mask(lambda b, h, i, j, told=told: told(b, h, i, j), batch, 1, before + end, n, where)
        whole = create_mask(seen, 2, 1, 97, 97, where)[batches, :, start - before : start + end, slice(*keys)]
        assert torch.equal(shown & partly[(..., *at)] | entirely[(..., *at)], whole)


MASKS = {
    "window": lambda b, h, i, j: (i - j).abs() <= 9,
    "causal": lambda b, h, i, j: (i >= j) & (i - j <= 9),
    "first keys": lambda b, h, i, j: ((i >= j) & (i - j <= 9)) | (j < 4),
    "documents": lambda b, h, i, j: (i + 30 * b) // 60 == (j + 30 * b) // 60,
    "heads": lambda b, h, i, j: (i - j).abs() <= 4 * (h + 1) * (b + 1),
    "tiles": lambda b, h, i, j: (i // 12 % 2 == j // 12 % 2) & ((i - j).abs() < 40),
}


def seen_by(name, q, k, block):
    """A mask of the table; for each sample and head where it depends on them."""
    leads = len(q) if name in ("heads", "documents") else None, q.shape[1] if name == "heads" else None
    return create_block_mask(MASKS[name], *leads, q.shape[2], k.shape[2], q.device.type, block)


def attend_to(q, k, v, table, name, block):
    mask = *seen_by(name, q, k, block).as_tuple()[:-1], MASKS[name]
    return flex_attention_operator(q, k, v, score_mod, mask, 0.3, {}, (table,), ())[:2]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [((20, 77), 2, [Shard(2)], 8), ((97, 0), 2, [Shard(2)], (4, 16)), ((3, 94), 2, [Shard(2)], (16, 4))]),
        pytest.param(
            4,
            [
                ((1, 50, 0, 46), 4, [Shard(2)], 8),
                ((20, 77), (2, 2), [Shard(2), Shard(1)], (4, 16)),
                ((20, 77), (2, 2), [Shard(0), Shard(2)], 8),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("kept", [True, False])
@on_ranks("world", timeout=300)
def test_named_keys(world, cases, kept):
    """Only blocks that the mask names are fetched, and again for the gradient where they are not kept."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, *shape, dtype=torch.float64) for shape in ((4, 97, 5), (2, 97, 5), (2, 97, 3))]
    table = torch.randn(4, 194, dtype=torch.float64)
    with mock.patch.object(online_softmax, "KEPT_BYTES", 1 << 20 if kept else 0):
        forget()  # what was planned with another constant
        for name in MASKS:
            for sizes, mesh_shape, placements, block in cases:
                try:
                    assert_matches_unsharded(
                        attend_to,
                        *(*tensors, table, name, block),
                        mesh_shape=mesh_shape,
                        placements=[placements] * 3 + [[Replicate()] * len(placements), None, None],
                        shard_sizes=[{placements.index(Shard(2)): sizes}] * 3 + [None] * 3,
                        rtol=1e-10,
                    )
                except Exception as error:
                    raise AssertionError(f"{name}, {sizes} as {placements}, blocks of {block}") from error
    forget()


def named_elsewhere(mask, sizes, block, rank):
    """How many keys each rank owns of those in blocks of which this rank's blocks of rows see something."""
    bounds = [sum(sizes[:r]) for r in range(len(sizes) + 1)]
    start, stop = bounds[rank], bounds[rank + 1]
    rows = mask[..., start // block * block : -(-stop // block) * block, :].any(-2)
    if stop == start:
        rows = torch.zeros_like(rows)
    blocks = torch.stack([part.any(-1) for part in rows.split(block, -1)], -1)
    keys = blocks.repeat_interleave(block, -1)[..., : mask.shape[-1]]
    return [0 if r == rank else int(keys[..., a:b].sum()) for r, (a, b) in enumerate(zip(bounds, bounds[1:]))]


@pytest.mark.parametrize(
    ("world", "sizes"), [(2, (100, 100)), pytest.param(4, (70, 1, 0, 129), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["causal", "documents", "heads"])
@on_ranks("world", timeout=300)
def test_bytes(world, sizes, name):
    """Each key of a named block is sent once each way; masks are compared once, and nothing when they are met again."""
    rank, block, table = shared_mesh(world).get_rank(), 16, torch.zeros(2, 400, dtype=torch.float64)
    x = shard(torch.randn(2, 2, 200, 4, dtype=torch.float64), shared_mesh(world), ROWS, {0: sizes})
    seen = seen_by(name, x, x, block)
    dense = create_mask(MASKS[name], *seen.kv_num_blocks.shape[:2], 200, 200, table.device)
    of_row = 2 * 4 * 8 * (2 * 2 // (dense.shape[0] * dense.shape[1]))  # keys and values, of float64
    fetched = [named_elsewhere(dense, sizes, block, r) for r in range(world)]
    sent, got = sum(row[rank] for row in fetched) * of_row, sum(fetched[rank]) * of_row
    mask = *seen.as_tuple()[:-1], MASKS[name]
    for gathered in (1, 0):
        given = x.detach().requires_grad_()
        with count_communication() as counted:
            out = flex_attention_operator(given, given, given, score_mod, mask, 1.0, {}, (table,), ())[0]
        assert (counted.bytes_sent, counted.collectives.get("all_gather", 0)) == (sent, gathered)
        assert counted.collectives["all_to_all"] == 1
        with count_communication() as counted:
            out.sum().backward()
        assert counted.bytes_sent == got


def attend_by_lists(q, k, v):
    """A mask that is made of lists: eager mode does not look at them."""
    counts, indices = torch.ones(1, 1, 4, dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1)
    mask = BlockMask.from_kv_blocks(counts, indices.repeat(1, 1, 1, 4), BLOCK_SIZE=8).as_tuple()
    return flex_attention_operator(q, k, v, lambda score, *_: score, mask, 1.0, {}, (), ())[:2]


@on_ranks(2)
def test_lists_of_fewer_keys():
    tensors = torch.randn(3, 2, 2, 32, 4, dtype=torch.float64).unbind()
    layout = {"mesh_shape": 2, "placements": [ROWS] * 3, "shard_sizes": [{0: (20, 12)}] * 3}
    assert_matches_unsharded(attend_by_lists, *tensors, rtol=1e-10, **layout)


def check_function(compiled: bool) -> None:
    """torch's own function, with functions that have captured a table that is learned."""
    torch.manual_seed(0)
    document = torch.randint(3, (33,)).sort().values
    mask = create_block_mask(lambda b, h, i, j: document[i] == document[j], None, None, 33, 33, document.device, 128)
    dtype = torch.float32 if compiled else torch.float64
    call = torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention
    tensors = [*torch.randn(3, 1, 2, 33, 16, dtype=dtype), torch.randn(2, 33, dtype=dtype)]

    def attended(q, k, v, table):
        return call(q, k, v, lambda score, b, h, i, j: score + table[h, i], mask)

    layout = {"mesh_shape": 2, "placements": [ROWS] * 3 + [None], "shard_sizes": [{0: (20, 13)}] * 3 + [None]}
    assert_matches_unsharded(attended, *tensors, check_grads=not compiled, **layout)


@on_ranks(2)
def test_messages():
    """All keys and values travel in one message each way; to a rank that has no queries none do; by heads none."""
    table, document = torch.randn(4, 66, dtype=torch.float64), torch.zeros(3, 33, dtype=torch.int64)
    for placements, sizes in ((ROWS, (20, 13)), (ROWS, (33, 0)), (HEADS, (1, 3))):
        x = shard(torch.randn(3, 4, 33, 5, dtype=torch.float64), shared_mesh(2), placements, {0: sizes})
        mine, rank = x.to_local(), shared_mesh(2).get_rank()
        x.requires_grad_()
        with count_communication() as counted:
            out, _ = attend(x, x, x, table, document, 64)  # one block
        sends = placements == ROWS and mine.numel() > 0 and sizes[1 - rank] > 0
        assert (counted.messages, counted.bytes_sent) == (int(sends), sends * 2 * mine.numel() * 8)
        with count_communication() as counted:
            out.sum().backward()
        assert counted.messages == int(sends)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2, timeout=300)
def test_function(compiled):
    # On CPUs torch's function refuses gradients, but the operator that it calls has them.
    with mock.patch.object(functions, "_validate_device", lambda *operands: None):
        check_function(compiled)


class Block(torch.nn.Module):
    """Queries are a view of a projection, and on the second rank the lists of the mask begin inside of those given."""

    def __init__(self, backend):
        super().__init__()
        self.project, self.mask = torch.nn.Linear(8, 24), near_keys()
        self.register_buffer("slopes", torch.rand(2))
        self.backend = backend

    def attend(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s - self.slopes[h] * (i - j).abs(), block_mask=self.mask)
        return x + out.transpose(1, 2).flatten(2).sin()

    def forward(self, x):
        attend = torch.compile(self.attend, backend=self.backend, fullgraph=True)
        return (attend if isinstance(x, ShardTensor) else self.attend)(x)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2, timeout=400)
def test_compiled_block(backend):
    """On CPUs inductor has flex_attention in float32, and without gradients."""
    torch.manual_seed(0)
    block, trains = Block(backend), backend == "aot_eager"
    dtype = torch.float64 if trains else torch.float32
    x, sizes = torch.randn(1, 33, 8, dtype=dtype), {0: (22, 11)}
    layout = {"mesh_shape": 2, "placements": [Shard(1)], "shard_sizes": sizes}
    with mock.patch.object(functions, "_validate_device", lambda *operands: None):
        block = block.to(dtype).requires_grad_(trains)
        assert_matches_unsharded(block, x, rtol=1e-10 if trains else None, check_grads=trains, **layout)


def near_keys():
    return create_block_mask(lambda b, h, i, j: (i - j).abs() < 3, None, None, 33, 33, torch.empty(0).device, 4)


def of_distances(x, mask):
    near = flex_attention(x, x, x, block_mask=mask)
    return near + flex_attention(x, x, x, lambda score, b, h, i, j: score - 0.1 * (i - j).abs())


def seen_function(path: str) -> dict[str, int]:
    """The function's messages. Results and gradients are those that it has where nothing counts or records."""
    x = shard(torch.randn(1, 2, 33, 4, dtype=torch.float64), shared_mesh(2), ROWS, {0: (20, 13)})
    mask = near_keys()

    def both():
        given = x.detach().requires_grad_()
        (out := of_distances(given, mask)).square().sum().backward()
        return out.full_tensor(), given.grad.full_tensor()

    with mock.patch.object(functions, "_validate_device", lambda *operands: None):
        expected = both()
        with count_communication() as counted:
            given = x.detach().requires_grad_()
            of_distances(given, mask).square().sum().backward()
        torch.testing.assert_close(given.grad.full_tensor(), expected[1], rtol=1e-12, atol=1e-12)
        with timeline(path):
            recorded = both()
        torch.testing.assert_close(recorded, expected, rtol=1e-12, atol=1e-12)
    return {"messages": counted.messages, "bytes_sent": counted.bytes_sent}


def test_function_is_seen(tmp_path):
    """torch compiles what it calls as a whole, also in eager mode, which it cannot where a mode sees operators."""
    path = tmp_path / "trace.json"
    counted = run_distributed(seen_function, 2, str(path))
    assert counted[0]["messages"] == 4
    x = torch.empty(1, 2, 33, 4, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(functions, "_validate_device", lambda *operands: None):
        sizes = {0: (20, 13)}
        function = partial(of_distances, mask=near_keys())  # with values, which a preview would not have
        found = explain(function, x, mesh=2, shard=2, shard_sizes=sizes, backward=lambda y: y.square().sum())
    assert [{name: found.total(rank, name) for name in counted[rank]} for rank in (0, 1)] == counted
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["name"].partition(" of ")[0] for event in events} >= {"flex_attention", "all_to_all"}


def operand():
    return shard(torch.randn(1, 4, 8, 4), shared_mesh(2), [Shard(2)])


def captured(q):
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 8, 8, q.device, 8).as_tuple()
    bias = q[0, 0, :, 0]
    flex_attention_operator(q, q, q, lambda score, b, h, i, j, bias: score + bias[i], mask, 1.0, {}, (bias,), ())


def drawn_from(q):
    bias = q[0, 0, :, 0]
    create_block_mask(lambda b, h, i, j: bias[i] > bias[j], 1, 1, 80, 80, bias.device)


def window_of(q):
    return create_block_mask(lambda b, h, i, j: (i - j).abs() < 2, None, None, 8, 8, q.device.type, 4).as_tuple()


def differing(q):
    mask = window_of(q)
    mask[3].fill_(q.device_mesh.get_rank())
    flex_attention_operator(q, q, q, lambda score, *_: score, mask, 1.0, {}, (), ())


def overwritten(q):
    mask = window_of(q)
    for _ in range(2):
        flex_attention_operator(q, q, q, lambda score, *_: score, mask, 1.0, {}, (), ())
        mask[3].data.fill_(1)


def documents(q):
    varlen_attn(*[q[0].transpose(0, 1)] * 3, *[torch.tensor([0, 3, 8], dtype=torch.int32)] * 2, 5, 5)


ANY = Exception  # until torch 2.13 the compiler's, which has the text
ERRORS = {
    "features": (
        lambda q: flex_attention(*[shard(torch.randn(1, 4, 8, 4), q.device_mesh, [Shard(3)])] * 3),
        ANY,
        "shards the features, which every score needs unsharded",
    ),
    "captured": (captured, ANY, "has captured, is sharded.*Remedy: redistribute it to Replicate"),
    "keys": (lambda q: flex_attention(q, q[:, :, :0], q[:, :, :0]), ANY, "flex_attention.*there are no keys"),
    "differing": (differing, RanksDiffer, "flex_attention: the block mask is not sharded, but differs between ranks"),
    "overwritten": (overwritten, RuntimeError, "lists of a block mask were changed.*make a new block mask"),
    "documents": (documents, ANY, "varlen_attn: its kernel takes whole documents.*call flex_attention"),
    "nested": (
        lambda q: torch.nested.nested_tensor_from_jagged(q[0, 0], torch.tensor([0, 3, 8])),
        ANY,
        "layout torch.jagged.*attend with a mask",
    ),
    "mask": (drawn_from, ANY, "would be called 6400 times"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_refusals(name):
    raises_alike(operand, name, silent=name not in ("differing", "overwritten"))  # masks are compared

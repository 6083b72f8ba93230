"""``grid_sample`` and ``affine_grid``: an image at places that a grid gives.

Every output may read any pixel of its channel. Where batch or channels can be sharded, torch's kernel computes each
shard of them: an image that is sharded in space is exchanged to these, the parts of a sharded grid go around a ring,
see [Note: ring] in ring.py, and the result is exchanged to the grid's layout. So nothing is gathered.

With fewer channels than ranks (images, masks, flows) each rank samples where its part of the grid says. The ranks tell
each other which rows and columns they read there, and exchange those. If the grid moves pixels little, few are beyond
their own. Weights and places are those of torch's kernels, but for their rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat.c10d import group_along
from ...communication.halo import Fetch
from ...communication.redistribute import all_gather
from ...dispatch.tensor import redistribute_to
from ...errors import UnsupportedSharding
from ...layout.intervals import Interval, map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Plan, operator
from ...ranks.cuda_graphs import check_has_values
from ..common.alignment import widened
from ..common.batch_parallel import Names, Result, plan_by_batch
from ..common.contraction import ContractionPlan, plan_contraction
from ..common.named_dims import Form, Label, arrange, fresh, shared
from ..common.reduce import rank_reduction


@operator(F.grid_sample, tensors="input grid")
def plan_grid_sample(
    call: Arguments,
    input: ShardTensorSpec,
    grid: ShardTensorSpec,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Plan:
    call.returned(F.grid_sample, input, grid, mode, padding_mode, align_corners)
    if call.autocast() is not None:  # by whose rules it runs in float32
        half = (torch.float16, torch.bfloat16)
        call.cast(torch.float32, *(name for name, spec in call.tensors.items() if spec.tensor_meta.dtype in half))
    input, grid = call.tensors["input"], call.tensors["grid"]
    spatial = len(input.shape) - 2
    pixels: list[Label] = [f"pixels {d}" if n > 1 else None for d, n in enumerate(input.shape[2:])]
    places = [f"places {d}" for d in range(spatial)]
    form = Form(
        (("batch", "channels", *pixels), ("batch", *places, "coordinates")),
        ("batch", "channels", *places),
        frozenset({"coordinates", *pixels} - {None}),
    )

    def sample(x: Tensor, at: Tensor) -> Tensor:
        if x.numel() and at.numel():
            return F.grid_sample(x, at, mode, padding_mode, align_corners)
        return (x.sum() + at.sum()).expand(len(x), x.shape[1], *at.shape[1:-1])  # not all of torch's kernels can

    try:
        plan = plan_contraction(call, call.name, sample, form, "input", "grid")
    except UnsupportedSharding:
        # As if every rank could read all of the image: it is fetched where it is sharded in space.
        form = replace(form, terms=(("batch", "channels", *[None] * spatial), form.terms[1]), ways=(shared, fresh))
        how = arrange(call.name, form, (input, _divided(call, input, grid)))
        image, at = how.targets
        kept = {m: input.layout[m] for d, m in input.sharded_dims().items() if d > 1}
        image = image.with_axes({m: axis for m, axis in kept.items() if image.placements[m].is_replicate()})
        how = replace(how, targets=(call.redistribute("input", image), call.redistribute("grid", at)))
        plan = ContractionPlan(how, sample)
        plan.function = _Pixels(image, mode, padding_mode, bool(align_corners))
        return plan
    moved = {
        m: AxisLayout(Shard(q.dim + 1), grid.sizes[m])
        for m, (p, q) in enumerate(zip(input.placements, grid.placements, strict=True))
        if isinstance(p, Shard) and isinstance(q, Shard) and plan.outputs.placements[m] == Shard(1)
        if p.dim > 1 and 0 < q.dim <= spatial
    }
    if moved:
        call.then = plan.outputs.with_axes(moved)
    return plan


def _divided(call: Arguments, input: ShardTensorSpec, grid: ShardTensorSpec) -> ShardTensorSpec:
    """The grid, of which ranks take a part each where they have parts of the image: in the proportions of these."""
    for d, m in input.sharded_dims().items():
        if d < 2 or not grid.placements[m].is_replicate():
            continue
        free = [p for p in range(1, len(grid.shape) - 1) if p not in grid.sharded_dims()]
        if not free:
            raise call.refuse(
                f"no dim of the grid is left to be sharded on mesh dim {m}, which shards dim {d} of the image",
                "redistribute both to shard fewer dims",
            )
        ranks = grid.mesh.size(m)
        place = d - 1 if d - 1 in free and grid.shape[d - 1] >= ranks else max(free, key=lambda p: grid.shape[p])
        n, length = input.shape[d], grid.shape[place]
        sizes = map_boundaries(input.sizes_along(m), lambda b, n=n, length=length: b * length // n)  # type: ignore[misc]
        grid = grid.with_axes({m: AxisLayout(Shard(place), sizes)})
    return grid


class _Pixels:
    """What ``grid_sample`` gives for this rank's part of the grid, from the pixels that it reads. Differentiable.

    Args:
        image: of the image whose shard it is called with.
    """

    def __init__(self, image: ShardTensorSpec, mode: str, padding: str, align_corners: bool) -> None:
        self._image, self._mode, self._padding, self._align_corners = image, mode, padding, align_corners
        self._fetched = {d: m for d, m in image.sharded_dims().items() if d > 1}

    def __call__(self, x: Tensor, at: Tensor) -> Tensor:
        check_has_values("grid_sample", at)
        dtype, spatial = x.dtype, x.ndim - 2
        x, at = widened(x, at)
        numbers = [torch.arange(len(x), device=x.device).view(-1, *[1] * spatial)]
        # The last dim of an image is the first coordinate of a grid.
        taps = [self._taps(c, n) for c, n in zip(reversed(at.unbind(-1)), self._image.shape[2:], strict=True)]
        ends = self._exchange_ends({d: taps[d - 2][0] for d in self._fetched})
        x = Fetch.of(self._image, {d: read for d, (read, _) in ends.items()})(x)
        x = F.pad(x, (0, 1) * spatial)  # with the zero that is read outside
        weights: Tensor | None = None
        for d, (places, weight) in enumerate(taps, 2):
            first = ends[d][1] if d in ends else 0
            outside = places < 0
            places = torch.where(outside, x.shape[d] - 1, places - first)
            shape = [len(places) if e == d else 1 for e in range(2, x.ndim)] + [*at.shape[:-1]]
            numbers.append(places.reshape(shape))
            weight = weight.reshape(shape)
            weights = weight if weights is None else weights * weight
        assert weights is not None
        values = x.movedim(1, -1)[tuple(numbers)] * weights.unsqueeze(-1)
        return values.sum(tuple(range(spatial))).movedim(-1, 1).to(dtype).contiguous()

    def _exchange_ends(self, places: Mapping[int, Tensor]) -> dict[int, tuple[list[Interval], int]]:
        """For each dim the intervals that the ranks along it read, and where the own one begins."""
        ends = {}
        for d, m in self._fetched.items():
            read, n = places[d], self._image.shape[d]
            if read.numel():
                mine = torch.stack([-torch.where(read < 0, n, read).amin(), read.amax() + 1])
            else:
                mine = torch.tensor([-n, 0], device=read.device)
            # Ranks along other dims of the image pass on what they have fetched along this one.
            mine = rank_reduction(self._image, [k for k in self._fetched.values() if k != m])(mine, "max")
            table = [(-a, b) for a, b in all_gather(mine, group_along(self._image.mesh, m)).tolist()]
            ends[d] = table, table[self._image.coordinate[m]][0]
        return ends

    def _taps(self, at: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The pixels read along a dim of length ``n``, -1 outside of it, and their weights, both ``(taps, ...)``."""
        steps: tuple[int, ...] = (0, 1)
        x = self._unnormalized(at, n)
        if self._mode == "bicubic":
            first = x.detach().floor()
            t = x - first
            steps = (-1, 0, 1, 2)
            weights = torch.stack([_far(t + 1), _near(t), _near(1 - t), _far(2 - t)])
        elif self._mode == "nearest":
            x = self._padded(x, n)
            first, steps = x.detach().round(), (0,)
            weights = (x.sign() * 0 + 1).unsqueeze(0)  # a gradient of zero, as torch has it
        else:
            x = self._padded(x, n)
            first = x.detach().floor()
            weights = torch.stack([first + 1 - x, x - first])
        places = torch.stack([first + step for step in steps])
        if self._mode == "bicubic":
            places = self._padded(places, n)
        return torch.where((places >= 0) & (places <= n - 1), places, -1).long(), weights

    def _unnormalized(self, at: Tensor, n: int) -> Tensor:
        """Coordinates in pixels, rounded as torch's kernels round them: for images in one step, by a fused product."""
        if self._align_corners:
            return (at + 1) * ((n - 1) / 2)
        if len(self._image.shape) == 4:
            return torch.add(at.new_tensor(-0.5), at + 1, alpha=n / 2)
        return (at + 1) * (n / 2) - 0.5

    def _padded(self, x: Tensor, n: int) -> Tensor:
        """The coordinates of what is read instead of what is outside. The gradient is zero where that is an edge."""
        if self._padding == "zeros":
            return x
        if self._padding == "reflection":
            low, span = (0.0, n - 1) if self._align_corners else (-0.5, n)
            x = (x - low).abs().fmod(2 * span) if span else x * 0
            x = torch.minimum(x, 2 * span - x) + low
        return torch.where((x > 0) & (x < n - 1), x, x.detach().clamp(0, n - 1))


# The weights of a cubic convolution, of pixels within one pixel of a place, and of those up to two away.


def _near(t: Tensor) -> Tensor:
    return (1.25 * t - 2.25) * t * t + 1


def _far(t: Tensor) -> Tensor:
    return ((-0.75 * t + 3.75) * t - 6) * t + 3


def _declare_grid_sampler(name: str) -> None:
    @operator(getattr(torch, name), getattr(torch.ops.aten, name), tensors="input grid")
    def plan_grid_sampler(
        call: Arguments,
        input: ShardTensorSpec,
        grid: ShardTensorSpec,
        interpolation_mode: int,
        padding_mode: int,
        align_corners: bool,
    ) -> Plan:
        """The operators below ``grid_sample``, which take numbers for the modes."""
        mode = ("bilinear", "nearest", "bicubic")[interpolation_mode]
        return plan_grid_sample(call, input, grid, mode, ("zeros", "border", "reflection")[padding_mode], align_corners)


for _name in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"):
    _declare_grid_sampler(_name)


@operator(F.affine_grid, tensors="theta")
def plan_affine_grid(
    call: Arguments, theta: ShardTensorSpec, size: Sequence[int], align_corners: bool | None = None
) -> Plan:
    meta = call.returned(F.affine_grid, theta, list(size), align_corners)
    rows = {m: AxisLayout(Replicate()) for d, m in theta.sharded_dims().items() if d}
    if rows and theta.shape.numel() * theta.mesh.size() <= meta.numel():  # see [Note: small operands] in pointwise.py
        theta = call.tensors["theta"] = theta.with_axes(rows)
        call.then_do("theta", lambda t, whole=theta: redistribute_to(t, whole))  # type: ignore[misc]
    lengths = tuple(size[1:])

    def grid(local: Tensor) -> Tensor:
        return F.affine_grid(local, [local.shape[0], *lengths], align_corners)

    names: Names = ["batch", *[None] * (len(meta.shape) - 1)]
    result = Result(meta.shape, names, theta.tensor_meta.dtype)
    return plan_by_batch(call, grid, {"theta": ["batch", None, None]}, [result])

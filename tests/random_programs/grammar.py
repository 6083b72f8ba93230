"""What programs are made of: lines with blanks, and what blanks are filled with.

A line that torch refuses on one device is drawn again, so lines need no conditions of their own.
"""

from __future__ import annotations

import random

import torch

FUNCTIONS = [
    *(f"{{x}}.{name}()" for name in ("sin", "tanh", "sigmoid", "neg", "abs", "relu", "square", "clone", "contiguous")),
    *(f"{{x}}.{name}()" for name in ("detach", "double", "erf", "round", "sign", "atan", "expm1")),
    *(f"F.{name}({{x}})" for name in ("gelu", "silu", "elu", "softplus", "hardtanh")),
    "torch.zeros_like({x})",
    "{x}.new_zeros({x}.shape)",
    "torch.ones_like({x})",
    "{x}.float().double()",
    "{x}.clamp(-.5, {number})",
    "{x} + {number}",
    "1 / ({x} ** 2 + 1)",
]
PAIRS = [
    *(f"torch.{name}({{x}}, {{fits}})" for name in ("add", "mul", "sub", "maximum", "minimum", "atan2")),
    "torch.where({x} > {fits}, {x}, {fits} * 2)",
    "torch.where({x} > 0, {x}, 1.0)",
    "torch.where({mask}, 0.5, {x})",
    "torch.where({mask}, {x}, {fits})",
    "torch.lerp({x}, {like}, .3)",
    "torch.addcmul({x}, {like}, {fits})",
    "torch.hypot({x} + 1.5, {fits})",
    "torch._foreach_mul([{x}, {other}], 2.0)",
    "torch._foreach_add([{x}, {other}], [{like}, {other}])",
]
VIEWS = [
    "{x}.narrow({dim}, {start}, {length})",
    "{x}[{part}]",
    "{x}[{entry}]",
    "{x}[{strided}]",
    "{x}[..., None]",
    "{x}[{part}][{entry}]",
    "{x}.select({dim}, {at})",
    "{x}.transpose({dim}, {dim2})",
    "{x}.movedim({dim}, {dim2})",
    "{x}.permute({order})",
    "{x}.unsqueeze({dim})",
    "{x}.squeeze({dim})",
    "{x}.squeeze()",
    "{x}.flatten({dim}, {dim2})",
    "{x}.reshape({factors})",
    "{x}.view({factors})",
    "{x}.unflatten({dim}, ({small}, -1))",
    "{x}.unsqueeze({dim}).expand({grown})",
    "{x}.expand(2, *{x}.shape)",
    "{x}.split({small}, {dim})",
    "{x}.chunk({small}, {dim})",
    "{x}.unbind({dim})",
    "{x}.tensor_split({small}, {dim})",
    "{x}.diagonal({shift}, {dim}, {dim2})",
    "{x}.unfold({dim}, {small}, {stride})",
    "{x}.view_as({like})",
    "{x}.T",
    "{x}.mT",
]
WRITES = [
    "{x}.add_({number})",
    "{x}.mul_({number})",
    "{x}.add_({fits}, alpha=2)",
    "{x}.mul_({fits})",
    "{x}.zero_()",
    "{x}.fill_({number})",
    "{x}.clamp_(min={number})",
    "F.relu_({x})",
    "{x}.copy_({like})",
    "{x}.copy_({fits})",
    "{x}[{part}] = {piece}",
    "{x}[{part}] += {piece}",
    "{x}[{strided}] = {number}",
    "{x}[{entry}] = {number}",
    "{x}[{entry}] *= 2",
    "{x}[{part}].mul_(2)",
    "{x}[{mask}] = {number}",
    "{x}[{mask}] *= .5",
    "{x}[{mask}] = {like}[{mask}] * 2",
    "{x}[{like} > .2] = {number}",
    "{x}[{like} > .2] = {fits}[{fits} > .2]",
    "{x}.masked_fill_({like} < 0, {number})",
    "{x}.masked_fill_({mask}, {number})",
    "{x}[{lines}] = {number}",
    "{x}[{lines}] += {number}",
    "{x}.index_add_({dim}, {indices}, rand({seed}, {shape_of_indices}))",
    "{x}.index_fill_({dim}, {indices}, {number})",
    "{x}.index_copy_({dim}, {unique}, rand({seed}, {shape_of_unique}))",
    "{x}.scatter_add_({dim}, randint({seed}, {size}, {shape}), rand({seed}, {shape}))",
    "{x}.scatter_({dim}, {ints}, {number})",
    "{x}.index_put_(({indices},), torch.tensor({number}).double(), accumulate=True)",
    "{x}.index_put_(({vector},), torch.tensor({number}).double(), accumulate=True)",
    "{x}.detach()[{part}] = {number}",
    "{x}.detach().mul_({number})",
    "with torch.no_grad(): {leaf}[{part}] = {number}",
    "with torch.no_grad(): {leaf}[{entry}].mul_(.5)",
    "with torch.no_grad(): {leaf}.add_({like})",
    "with torch.no_grad(): {x}[{part}] += {piece}",
    "torch.add({x}, {like}, out={free})",
    "torch.mul({like}, 2, out={free})",
    "torch._foreach_add_([{x}, {other}], {number})",
    "torch._foreach_mul_([{x}[{part}], {other}], 2.0)",
    "{free}.requires_grad_()",
    "{x}.diagonal(0, {dim}, {dim2}).zero_()",
    "{x}.fill_diagonal_({number})",
    "{x}.tril_({shift})",
    "{x}.squeeze_({dim})",
    "{x}.transpose_({dim}, {dim2})",
    "{x}.unsqueeze_({dim})",
    "{mask}.logical_not_()",
    "{mask}[{part}] = True",
    "{z}.mul_(1j)",
    "{z}.real.add_({number})",
]
REDUCTIONS = [
    *(f"{{x}}.{name}({{dim}}, keepdim={{keep}})" for name in ("sum", "mean", "amax", "logsumexp", "prod")),
    *(f"{{x}}.{name}()" for name in ("sum", "mean", "amin", "max", "norm")),
    *(f"{{x}}.{name}({{dim}})" for name in ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip")),
    "{x}.sum(({dim}, {dim2}), keepdim={keep})",
    "{x}.mean(({dim}, {dim2}))",
    "{x}.aminmax(dim={dim}, keepdim={keep})",
    "{x}.var({dim}, unbiased=False, keepdim={keep})",
    "torch.std_mean({x} + rand({seed}, {shape}), {dim}, keepdim={keep})",
    "({x} ** 2 + .1).norm(dim={dim}, keepdim={keep})",
    "F.normalize({x} + 2, dim={dim})",
    "{x}.sort({dim}, stable=True)",
    "({x} + rand({seed}, {shape})).topk({small}, {dim})",
    "({x} + rand({seed}, {shape})).max({dim}, keepdim={keep})",
    "({x} + rand({seed}, {shape})).median({dim}, keepdim={keep})",
    "({x} + rand({seed}, {shape})).cummax({dim})",
    "{x}.diff(dim={dim})",
    "{x}.roll({shift}, {dim})",
    "{x}.flip(({dim}, {dim2}))",
    "torch.trapezoid({x}, dim={dim})",
]
JOINS = [
    "torch.cat([{x}, {like}], {dim})",
    "torch.cat([{x}, {x}[{part}]], {dim})",
    "torch.stack([{x}, {like}], {dim})",
    "F.pad({x}, {padding}, value=.5)",
    "F.pad({x}, (1, 2), mode={mode})",
    "{x}.repeat({repeats})",
    "{x}.tile((2,))",
    "{x}.repeat_interleave(2, {dim})",
    "{x}.index_select({dim}, {indices})",
    "{x}.index_select({dim}, {vector})",
    "{x}[{lines}]",
    "{x}[{vector}]",
    "{x}.gather({dim}, randint({seed}, {size}, {shape}))",
    "{x}.gather({dim}, {ints})",
    "{x}.take_along_dim({x}.detach().argsort({dim}, stable=True), {dim})",
    "{x}.tril({shift})",
    "{x}.masked_fill({mask}, {number})",
    "{x}[{x} > 0].sum()",
    "{x}[{mask}].sum()",
    "{x}[{x}.flatten(1).sum(1) > 0].sum(0)",
    "{x}.index_add({dim}, {indices}, rand({seed}, {shape_of_indices}))",
    "{x}.scatter_add({dim}, randint({seed}, {size}, {shape}), {like})",
    "torch.block_diag({x}, {like})",
    "torch.outer({x}, {x})",
]
NETWORKS = [
    "seeded({seed}, nn.Linear, {last}, 3)({x})",
    "seeded({seed}, nn.LayerNorm, {last})({x})",
    "seeded({seed}, nn.Conv1d, {second}, 2, {small}, {stride}, padding={padded})({x})",
    "seeded({seed}, nn.Conv2d, {second}, 2, {small}, {stride}, padding={padded})({x})",
    "seeded({seed}, nn.ConvTranspose1d, {second}, 2, {small}, {stride})({x})",
    "seeded({seed}, nn.BatchNorm1d, {second})({x})",
    "seeded({seed}, nn.GroupNorm, 1, {second})({x})",
    "seeded({seed}, nn.PReLU)({x})",
    "seeded({seed}, nn.GRU, {last}, 2, batch_first=True)({x})[0]",
    "seeded({seed}, nn.MultiheadAttention, {last}, 1, batch_first=True)({x}, {x}, {x}, need_weights=False)[0]",
    "{x} @ {like}.mT",
    "torch.bmm({x}.mT, {x})",
    "torch.einsum('a...b,a...b->a...', {x}, {like})",
    "F.avg_pool1d({x}, 2, {stride})",
    "F.max_pool1d({x} + rand({seed}, {shape}), 2, {stride})",
    "F.avg_pool2d({x}, 2, {stride})",
    "F.adaptive_avg_pool1d({x}, 2)",
    "F.interpolate({x}, size={small}, mode='linear')",
    "F.interpolate({x}, scale_factor=2, mode='nearest')",
    "F.glu({x}, {dim})",
    "F.scaled_dot_product_attention({x}, {x}, {x})",
    "torch.cdist({x}, {like} + rand({seed}, {shape}))",
    "seeded({seed}, nn.LSTM, {last}, 2, bidirectional={keep})({x})[0]",
    "seeded({seed}, nn.Conv1d, {second}, 2, 2, dilation={small}, padding={small}, padding_mode={mode})({x})",
    "seeded({seed}, nn.Conv2d, {second}, {second}, 3, padding=2, dilation=2, groups={second})({x})",
    "seeded({seed}, nn.Conv2d, {second}, 2, (3, 1), {stride}, padding=(1, 0), padding_mode={mode})({x})",
    "seeded({seed}, nn.Conv3d, 1, 2, 3, padding={padded})({x}.unsqueeze(0).unsqueeze(0))",
    "seeded({seed}, nn.ConvTranspose2d, {second}, 2, 3, {stride}, padding={padded})({x})",
    "seeded({seed}, nn.InstanceNorm1d, {second}, affine=True)({x})",
    "seeded({seed}, nn.BatchNorm2d, {second}).eval()({x})",
    "seeded({seed}, nn.BatchNorm2d, {second})({x})",
    "seeded({seed}, nn.RMSNorm, {last})({x})",
    "seeded({seed}, nn.LocalResponseNorm, 3)({x})",
    "seeded({seed}, nn.Bilinear, {last}, {last}, 2)({x}, {like})",
    "seeded({seed}, nn.TransformerEncoderLayer, {last}, 1, 5, 0.0, batch_first=True)({x})",
    "seeded({seed}, nn.MultiheadAttention, {last}, 1)({x}, {like}, {x})[{padded}]",
    "seeded({seed}, nn.Embedding, 3, 2)({ints} % 3)",
    "seeded({seed}, nn.Linear, {last}, 2, bias={keep}).requires_grad_(False)({x})",
    "F.interpolate({x}, scale_factor=1.5, mode='bilinear', align_corners={keep})",
    "F.interpolate({x}, size=({small}, 5), mode='bicubic')",
    "F.interpolate({x}, size=({small}, 5), mode='area')",
    "F.grid_sample({x}, rand({seed}, (1, 3, 4, 2)).expand({x}.shape[0], -1, -1, -1), align_corners={keep})",
    "F.max_pool2d({x} + rand({seed}, {shape}), 3, {stride}, 1)",
    "F.max_pool2d({x} + rand({seed}, {shape}), 2, return_indices=True)[0]",
    "F.adaptive_max_pool1d({x} + rand({seed}, {shape}), {small})",
    "F.lp_pool1d({x}, 3, 2)",
    "F.pixel_shuffle({x}.repeat(1, 4, 1, 1), 2)",
    "F.unfold({x}, 3, padding=1, stride={stride})",
    "F.local_response_norm({x}, 3)",
    "F.cosine_similarity({x}, {like} + 2, dim={dim})",
    "F.pairwise_distance({x}, {like} + 3)",
    "torch.tensordot({x}, {like}, {small})",
    "torch.tensordot({x}, {like}, dims=([{dim}], [{dim}]))",
    "torch.kron({x}, {like}[:1])",
    "F.scaled_dot_product_attention({x}, {like}, {x}, is_causal=True)",
    "F.bilinear({x}, {like}, rand({seed}, (2, {last}, {last})))",
]
LOSSES = [
    *(f"F.{name}({{x}}, {{like}})" for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    "F.cross_entropy({x}, {like}.detach().softmax(1))",
    "F.cross_entropy({x}, randint({seed}, 2, ({x}.shape[0], *{x}.shape[2:])), ignore_index={padded})",
    "F.cross_entropy({x}, {x}.detach().argmax(1), label_smoothing=.1, reduction='none')",
    "F.nll_loss({x}.log_softmax(1), {like}.detach().argmin(1), reduction='sum')",
    "F.binary_cross_entropy_with_logits({x}, {like}.detach().sigmoid(), pos_weight=torch.tensor(2.0).double())",
    "F.binary_cross_entropy({x}.sigmoid(), ({like} > 0).double(), reduction='none')",
    "F.kl_div({x}.log_softmax({dim}), {like}.softmax({dim}), reduction='batchmean')",
    "F.gaussian_nll_loss({x}, {like}, {like} ** 2 + 1)",
    "F.poisson_nll_loss({x}, {like}.abs())",
    "F.cosine_embedding_loss({x}, {like} + 2, torch.ones({x}.shape[0]))",
    "F.triplet_margin_loss({x}, {like} + 1, {x}.flip(0) + 2)",
    "F.hinge_embedding_loss({x}, {like}.detach().sign())",
    "F.soft_margin_loss({x}, {like}.detach().sign())",
    "F.multilabel_soft_margin_loss({x}, ({like} > 0).double())",
    "F.margin_ranking_loss({x}, {like}, {x}.detach().sign(), margin=.3)",
]
ALGEBRA = [
    "torch.linalg.cholesky({x} @ {x}.mT + 3 * torch.eye({x}.shape[-2], dtype={x}.dtype))",
    "torch.linalg.inv({x} @ {x}.mT + 3 * torch.eye({x}.shape[-2], dtype={x}.dtype))",
    "torch.linalg.det({x} @ {x}.mT + torch.eye({x}.shape[-2], dtype={x}.dtype))",
    "torch.linalg.eigvalsh({x} @ {x}.mT + torch.arange({x}.shape[-2]).double().diag())",
    "torch.linalg.solve({x} @ {x}.mT + 3 * torch.eye({x}.shape[-2], dtype={x}.dtype), {x})",
    "torch.linalg.svdvals({x} + rand({seed}, {shape}))",
    "torch.linalg.qr({x} + rand({seed}, {shape}))[1].abs()",
    "torch.linalg.pinv({x} + rand({seed}, {shape}))",
    "torch.linalg.matrix_norm({x}, 'fro')",
    "torch.linalg.vector_norm({x}, {small}, {dim})",
    "torch.linalg.matrix_exp({x} @ {x}.mT * .01)",
    "torch.linalg.cross({x}.narrow({dim}, 0, 3), {like}.narrow({dim}, 0, 3), dim={dim})",
    "torch.linalg.multi_dot([{x}, {x}.mT, {x}])",
    "torch.fft.fft2({x}).abs().square()",
    "torch.fft.irfft(torch.fft.rfft({x}, dim={dim}), n={size}, dim={dim})",
    "torch.fft.fftshift({x}, {dim})",
    "torch.cov({x})",
    "torch.corrcoef({x} + rand({seed}, {shape}))",
    "torch.rot90({x}, 1, ({dim}, {dim2}))",
    "torch.renorm({x}, 2, {dim}, 1.5)",
    "torch.logaddexp({x}, {like})",
    "torch.nan_to_num({x} / ({x} > 0), posinf=2.0)",
    "torch.quantile({x} + rand({seed}, {shape}), .3, dim={dim}, keepdim={keep})",
    "({x} + rand({seed}, {shape})).kthvalue(1, {dim}, keepdim={keep})",
    "torch.bucketize({x}, torch.tensor([-.5, 0., .5]).double())",
    "torch.searchsorted({x}.detach().sort(-1)[0], {like}.detach().contiguous())",
    "torch.cumulative_trapezoid({x}, dim={dim})",
    "torch.gradient({x}, dim={dim})[0]",
    "torch.segment_reduce({x}, 'sum', lengths=torch.tensor([1, {x}.shape[0] - 1]), axis=0)",
    "torch.vander({x}, 3)",
    "torch.cartesian_prod({x}, {like})",
    "torch.nanmean({x} / ({x} > 0).double().sqrt(), {dim})",
    "torch.special.xlogy({x}, {like}.abs() + 1)",
    "torch.polar({x}.abs() + .1, {like})",
    "torch.count_nonzero({x} > 0, {dim})",
    "torch.isin({ints}, torch.tensor([0, 2]))",
    "torch.unique({ints})",
    "F.one_hot({ints} % 3, 3)",
]
NUMBERS = [
    "{x} > {number}",
    "{x} < {like}",
    "({x} > {number}).any({dim}, keepdim={keep})",
    "({x} > {number}).cumsum({dim})",
    "({x} > 0).sum({dim})",
    "{x}.argsort({dim}, stable=True)",
    "({x} + rand({seed}, {shape})).argmax({dim}, keepdim={keep})",
    "({x} > {number}).nonzero()[:, 0]",
    "({x} * 3).long()",
    "{ints} % {small}",
    "{ints}[{part}]",
    "{ints} * {fits}",
    "{mask} & {mask2}",
    "~{mask}",
    "{mask}.flip({dim})",
    "{mask}.double()",
    "torch.complex({x}, {like})",
    "torch.fft.fft({x}, dim={dim})",
    "torch.fft.rfft({x}, dim={dim})",
    "{z}.abs()",
    "{z}.real",
    "{z}.conj()",
    "torch.view_as_real({z})",
    "{z} * {z2}",
    "torch.fft.ifft({z}, dim={dim}).imag",
]
FLOW = [
    "checkpoint(lambda x: (x.sin() * x).tanh(), {x}, use_reentrant=False)",
    "torch.autograd.grad({x}.sin().sum(), [{x}], create_graph=True)[0]",
    "torch.autograd.grad({x}.sin().sum(), [{x}])[0]",
    "{x} * float({x}.detach().mean())",
    "torch.func.vmap(lambda x: x.softmax(0) * x.sum(), in_dims={dim})({x})",
    "torch.func.jvp(lambda x: x.sin() * x.sum(), ({x}.detach(),), ({x}.detach() * 2,))[1]",
    "copy.deepcopy({x}.detach())",
]
# A table, and how often a line is drawn from it.
TABLES = [(FUNCTIONS, 2), (PAIRS, 3), (VIEWS, 6), (REDUCTIONS, 3), (JOINS, 3), (NETWORKS, 5), (LOSSES, 1), (ALGEBRA, 2)]
TABLES += [(NUMBERS, 2), (FLOW, 1)]
WRITES_DRAWN = 6


class NothingFits(Exception):
    """No tensor of the program can fill this blank."""


class Blanks(dict[str, str]):
    """What the blanks of one line are filled with: each by the method of its name, once it is asked for.

    A digit after the name draws another one. All but tensors belong to ``x`` and to ``dim``.
    """

    def __init__(self, rng: random.Random, tensors: dict[str, torch.Tensor]) -> None:
        self.rng, self.tensors = rng, tensors

    def __missing__(self, key: str) -> str:
        self[key] = value = str(getattr(self, f"draw_{key.rstrip('2')}")())
        return value

    def tensor(self, fits) -> str:
        found = [name for name, tensor in self.tensors.items() if fits(tensor)]
        if not found:
            raise NothingFits
        return self.rng.choice(found)

    @property
    def operand(self) -> torch.Tensor:
        for key in ("x", "mask", "ints", "z"):
            if key in self:
                return self.tensors[self[key]]
        return self.tensors[self["x"]]

    @property
    def axis(self) -> int:
        return int(self["dim"]) % self.operand.ndim

    def indexing(self, index: object) -> str:
        return ":, " * self.axis + str(index)

    # -- tensors

    def draw_x(self) -> str:
        return self.tensor(lambda t: t.dtype == torch.float64 and t.ndim)

    def draw_other(self) -> str:
        return self.tensor(lambda t: t.dtype == torch.float64)

    def draw_like(self) -> str:
        shape = self.operand.shape
        return self.tensor(lambda t: t.dtype == torch.float64 and t.shape == shape)

    def draw_fits(self) -> str:
        return self.tensor(lambda t: t.dtype == torch.float64 and broadcasts(t, self.operand))

    def draw_free(self) -> str:
        return self.tensor(lambda t: t.dtype == torch.float64 and not t.requires_grad)

    def draw_mask(self) -> str:
        x = self.tensors[self["x"]] if "x" in self else None
        return self.tensor(lambda t: t.dtype == torch.bool and (t.ndim if x is None else broadcasts(t, x)))

    def draw_ints(self) -> str:
        x = self.tensors[self["x"]] if "x" in self else None
        return self.tensor(lambda t: t.dtype == torch.int64 and t.ndim and (x is None or t.ndim == x.ndim))

    def draw_vector(self) -> str:
        return self.tensor(lambda t: t.dtype == torch.int64 and t.ndim == 1)

    def draw_z(self) -> str:
        return self.tensor(lambda t: t.dtype == torch.complex128 and t.ndim)

    def draw_leaf(self) -> str:
        self["x"] = self.tensor(lambda t: t.is_leaf and t.requires_grad and t.ndim)
        return self["x"]

    def draw_piece(self) -> str:
        """What is written to ``x[part]``: another tensor, or a number."""
        if self.rng.random() < 0.4:
            return self.draw_number()
        rows = (slice(None),) * self.axis + (slice(int(self["start"]), int(self["stop"])),)
        shape = self.operand.detach()[rows].shape
        return self.tensor(lambda t: t.dtype == torch.float64 and t.shape == shape)

    # -- dims, and entries of one

    def draw_dim(self) -> int:
        n = self.operand.ndim
        return self.rng.randrange(n) - (n if self.rng.random() < 0.3 else 0)

    def draw_size(self) -> int:
        return self.operand.shape[self.axis]

    def draw_shape(self) -> tuple[int, ...]:
        return tuple(self.operand.shape)

    def draw_last(self) -> int:
        return self.operand.shape[-1]

    def draw_second(self) -> int:
        return self.operand.shape[min(1, self.operand.ndim - 1)]

    def draw_start(self) -> int:
        return self.rng.randrange(max(int(self["size"]), 1))

    def draw_length(self) -> int:
        return self.rng.randrange(int(self["size"]) - int(self["start"]) + 1)

    def draw_stop(self) -> int:
        return int(self["start"]) + int(self["length"])

    def draw_at(self) -> int:
        return self.rng.randrange(-int(self["size"]), int(self["size"]))

    def draw_part(self) -> str:
        return self.indexing(f"{self['start']}:{self['stop']}")

    def draw_entry(self) -> str:
        return self.indexing(self.draw_at())

    def draw_strided(self) -> str:
        return self.indexing(f"{self.rng.choice(['', 0, 1, -3])}::{self.rng.choice([2, 3])}")

    def draw_indices(self) -> str:
        count = self.rng.choice([0, 1, 3, 5])
        return f"torch.tensor({[self.rng.randrange(int(self['size'])) for _ in range(count)]}, dtype=torch.int64)"

    def draw_unique(self) -> str:
        size = int(self["size"])
        return f"torch.tensor({self.rng.sample(range(size), min(2, size))}, dtype=torch.int64)"

    def draw_lines(self) -> str:
        return self.indexing(self["unique"])

    def draw_shape_of_indices(self) -> tuple[int, ...]:
        return self.with_entries(self["indices"])

    def draw_shape_of_unique(self) -> tuple[int, ...]:
        return self.with_entries(self["unique"])

    def with_entries(self, indices: str) -> tuple[int, ...]:
        shape = list(self.operand.shape)
        shape[self.axis] = 0 if "[]" in indices else indices.count(", ")
        return tuple(shape)

    # -- shapes and numbers

    def draw_order(self) -> list[int]:
        return self.rng.sample(range(self.operand.ndim), self.operand.ndim)

    def draw_factors(self) -> tuple[int, int]:
        count = self.operand.numel()
        first = self.rng.choice([n for n in range(1, count + 1) if count % n == 0] or [1])
        return first, count // first

    def draw_grown(self) -> list[int]:
        shape = list(self.operand.shape)
        return [*shape[: self.axis], 2, *shape[self.axis :]]

    def draw_repeats(self) -> list[int]:
        return [2 if dim == self.axis else 1 for dim in range(self.operand.ndim)]

    def draw_padding(self) -> tuple[int, ...]:
        ends = (self.rng.randrange(-1, 3), self.rng.randrange(-1, 3))
        return (0, 0) * (self.operand.ndim - 1 - self.axis) + ends

    def draw_mode(self) -> str:
        return repr(self.rng.choice(["reflect", "replicate", "circular"]))

    def draw_keep(self) -> bool:
        return self.rng.random() < 0.5

    def draw_number(self) -> str:
        return str(self.rng.choice([0.0, 0.25, 0.75, 1.5, 2.5]))

    def draw_small(self) -> int:
        return self.rng.choice([1, 2, 3])

    def draw_stride(self) -> int:
        return self.rng.choice([1, 2])

    def draw_padded(self) -> int:
        return self.rng.choice([0, 1])

    def draw_shift(self) -> int:
        return self.rng.randrange(-2, 3)

    def draw_seed(self) -> int:
        return self.rng.randrange(1000)


def broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


def draw_line(rng: random.Random, tensors: dict[str, torch.Tensor]) -> tuple[str, bool]:
    """A line, and whether it is an expression whose tensors the program keeps."""
    tables = [table for table, _ in TABLES] + [WRITES]
    table = rng.choices(tables, [weight for _, weight in TABLES] + [WRITES_DRAWN])[0]
    return rng.choice(table).format_map(Blanks(rng, tensors)), table is not WRITES

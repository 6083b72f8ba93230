"""Accelerate, and the Trainer of transformers, at dp x domain: the losses, norms and evaluation of one process.

Data-parallel wrappers average gradients over all ranks. Those of a domain's ranks are equal, so this is the mean over
the data axis.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from shardtensor import RanksDiffer, parallel
from shardtensor.testing import run_distributed

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

STEPS, BATCH, MAX_NORM, LR = 5, 4, 0.05, 0.01
SIZES = (9, 4)
on_ranks = functools.partial(run_distributed, timeout=240)  # the first call on a rank imports transformers


class Segmentation(nn.Module):
    """A class for each point; those with the label -100 do not count. A loss as transformers' models have it."""

    layouts = {"pixels": Shard(2), "labels": Shard(1)}
    sizes = SIZES

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 3, 3, padding=1)
        )

    def forward(self, pixels, labels, **options):
        logits = self.body(pixels)
        items = options.get("num_items_in_batch")
        loss = F.cross_entropy(logits, labels, reduction="mean" if items is None else "sum")
        return {"loss": loss if items is None else loss / items, "logits": logits}


class Fields(Dataset):
    def __init__(self, n, *, ignored, seed):
        torch.manual_seed(seed)
        self.pixels = torch.randn(n, 2, 13, 6, dtype=torch.float64)
        self.labels = torch.randint(3, (n, 13, 6))
        self.labels[torch.rand(n, 13, 6) < ignored] = -100

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixels": self.pixels[i], "labels": self.labels[i]}


def segmentation(ignored=0.0):
    torch.manual_seed(0)
    model = Segmentation().double()
    return model, Fields(STEPS * BATCH, ignored=ignored, seed=1), Fields(2 * BATCH, ignored=ignored, seed=2)


def accuracy(logits, labels):
    counts = labels != -100
    return ((logits.argmax(1) == labels) & counts).double().sum() / counts.sum()


def linear(optimizer):
    return LambdaLR(optimizer, lambda step: 1 - step / STEPS)


@functools.cache
def alone(problem):
    """The (loss, norm) of each step, and of an evaluation the mean loss of batches, and the accuracy."""
    model, train, test = problem()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0)
    scheduler, steps = linear(optimizer), []
    for batch in DataLoader(train, BATCH):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        steps.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()))
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        outputs = [(model(**batch), batch["labels"]) for batch in DataLoader(test, BATCH)]
    logits, labels = torch.cat([out["logits"] for out, _ in outputs]), torch.cat([labels for _, labels in outputs])
    loss = sum(out["loss"].item() for out, _ in outputs) / len(outputs)
    assert all(norm > MAX_NORM for _, norm in steps)
    return steps, (loss, accuracy(logits, labels).item())


def check(steps, evaluation, problem):
    for found, expected in zip((steps, evaluation), alone(problem), strict=True):
        found, expected = (torch.tensor(values, dtype=torch.float64) for values in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


# -- Accelerate --------------------------------------------------------------------------------------------------------


def with_accelerate(how, accumulated):
    made = parallel.init(domain=2)
    accelerator = Accelerator(cpu=made.device.type == "cpu", gradient_accumulation_steps=accumulated)
    assert accelerator.num_processes == 4 and accelerator.device.type == made.device.type
    model, train, test = segmentation()
    if how == "parallelize":
        made.parallelize(model)
    if how == "DDP over dp":
        parallel.synchronize(model, made.mesh)
        model = nn.parallel.DistributedDataParallel(model, device_mesh=made.mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0)
    scheduler = linear(optimizer)
    if how == "prepare":
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
    assert isinstance(model, nn.parallel.DistributedDataParallel) == (how != "parallelize")

    batches = DataLoader(train, BATCH // 2 // accumulated, sampler=made.sampler(train, shuffle=False))
    losses, norms = [], []
    for batch in batches:
        batch = made.scatter(batch, Segmentation.layouts, shard_sizes=SIZES)
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
        losses.append(accelerator.reduce(loss.detach().full_tensor(), "mean"))
    norms = [norm.full_tensor() if how == "parallelize" else norm for norm in norms]
    steps = torch.stack([torch.stack(losses).view(STEPS, -1).mean(1), torch.stack(norms)], dim=1).tolist()

    model.eval()
    told = []
    with torch.no_grad():
        for batch in DataLoader(test, BATCH // 2, sampler=made.sampler(test, shuffle=False)):
            batch = made.scatter(batch, Segmentation.layouts, shard_sizes=SIZES)
            out = model(**batch)
            told.append([v.full_tensor() for v in (out["loss"], accuracy(out["logits"], batch["labels"]))])
    means = accelerator.reduce(torch.tensor(told, dtype=torch.float64).mean(0), "mean")
    check(steps, means.tolist(), segmentation)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("how", ["prepare", "parallelize", "DDP over dp"])
def test_accelerate_gives_the_numbers_of_one_process(how, accumulated):
    """With DDP over all ranks, which prepare() makes of the model, and with FSDP2 or DDP over the data axis."""
    on_ranks(with_accelerate, 4, how, accumulated)


# -- the Trainer -------------------------------------------------------------------------------------------------------


def vit():
    """A network of transformers as it is, in float64, and images that it classifies."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=2,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = ViTForImageClassification(config).double()
    model.layouts, model.sizes = {"pixel_values": Shard(2), "labels": Replicate()}, None
    images = torch.randn(STEPS * BATCH, 3, 8, 8, dtype=torch.float64)
    data = [{"pixel_values": image, "labels": i % 3} for i, image in enumerate(images)]
    return model, data, data[: 2 * BATCH]


with_ignored_labels = functools.partial(segmentation, ignored=0.3)


class OnDomains(Trainer):
    """As docs/lightning.md shows."""

    def __init__(self, made, *args, **options):
        super().__init__(*args, **options)
        self.made = made

    def get_train_dataloader(self):
        sampler = self.made.sampler(self.train_dataset, shuffle=False)
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, sampler=sampler)

    def get_eval_dataloader(self, eval_dataset=None):
        sampler = self.made.sampler(self.eval_dataset, shuffle=False)
        return DataLoader(self.eval_dataset, self.args.per_device_eval_batch_size, sampler=sampler)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = self.made.scatter(inputs, self.model.layouts, shard_sizes=self.model.sizes)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss.full_tensor()
        if not return_outputs:
            return loss
        return loss, {name: value.full_tensor() for name, value in outputs.items()}


def arguments(made, folder, accumulated=1):
    return TrainingArguments(
        folder, use_cpu=made.device.type == "cpu", ddp_find_unused_parameters=False,
        per_device_train_batch_size=BATCH // 2 // accumulated, gradient_accumulation_steps=accumulated,
        per_device_eval_batch_size=BATCH // 2, num_train_epochs=1, learning_rate=LR, lr_scheduler_type="linear",
        max_grad_norm=MAX_NORM, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,  # the samples may be on an accelerator
    )  # fmt: skip


def metrics(predicted):
    logits, labels = map(torch.as_tensor, (predicted.predictions, predicted.label_ids))
    return {"accuracy": accuracy(logits, labels).item(), "rows": len(labels)}


def with_trainer(problem, accumulated, folder):
    made = parallel.init(domain=2)
    model, train, test = problem()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in which the Trainer adds up the losses that it logs
    try:
        trainer = OnDomains(
            made, model, arguments(made, folder, accumulated),
            train_dataset=train, eval_dataset=test, compute_metrics=metrics,
        )  # fmt: skip
        trainer.train()
        found = trainer.evaluate()
    finally:
        torch.set_default_dtype(before)
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    steps = [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]
    check(steps, (found["eval_loss"], found["eval_accuracy"]), problem)
    assert found["eval_rows"] == 2 * len(test)  # both ranks of a domain have the same rows


@pytest.mark.parametrize(
    "problem, accumulated",
    [(segmentation, 1), (with_ignored_labels, 2), (vit, 1)],
    ids=["segmentation", "labels that do not count, two batches a step", "an unmodified ViT"],
)
def test_the_trainer_gives_the_numbers_of_one_process(problem, accumulated, tmp_path):
    on_ranks(with_trainer, 4, problem, accumulated, str(tmp_path))


# -- loaders that are split over all ranks -----------------------------------------------------------------------------


OTHER_BATCH = r"ranks \[[13]\] have another batch than rank [02], .* lost.*leave the loader out of prepare"


class WithItsOwnLoaders(OnDomains):
    get_train_dataloader, get_eval_dataloader = Trainer.get_train_dataloader, Trainer.get_eval_dataloader


def with_loaders_of_all_ranks(folder):
    made = parallel.init(domain=2)
    accelerator = Accelerator(cpu=made.device.type == "cpu")
    model, train, test = segmentation()
    for _ in range(20):  # an evaluation begins after many steps whose batches were right
        made.scatter(train.pixels[:2], Shard(2))
    batch = next(iter(accelerator.prepare(DataLoader(test, 2))))
    with pytest.raises(ValueError, match=OTHER_BATCH):
        made.scatter(batch, Segmentation.layouts)
    style = parallel.DomainParallel(inputs=Shard(2), outputs=Replicate())
    with pytest.raises(RanksDiffer, match=r"differ between ranks: .* plain inputs of Sequential \(DomainParallel\)"):
        parallelize_module(segmentation()[0].body, made.mesh["domain"], style)(batch["pixels"])

    trainer = WithItsOwnLoaders(
        made, model, arguments(made, folder), train_dataset=train, eval_dataset=test,
    )  # fmt: skip
    for start in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=OTHER_BATCH):
            start()


def test_a_loader_that_is_split_over_all_ranks_is_told(tmp_path):
    on_ranks(with_loaders_of_all_ranks, 4, str(tmp_path))

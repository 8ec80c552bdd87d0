"""Train in Lightning's loop: manual optimization, and this package's pipeline inside a step.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/lightning_loop.py
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, IterableDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain

import torchrec_2dsp as tdsp

ROWS = {"user": 50_000, "item": 20_000}
BATCH_SIZE, STEPS = 128, 20


class Log(IterableDataset[Batch]):
    """Yields this rank's batches."""

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(STEPS):
            draws = torch.rand(len(ROWS), BATCH_SIZE, generator=generator)
            ids = (torch.tensor(list(ROWS.values())).unsqueeze(1) ** draws).long() - 1
            lengths = torch.ones(ids.numel(), dtype=torch.int64)
            features = KeyedJaggedTensor(list(ROWS), ids.view(-1), lengths=lengths)
            dense = torch.rand(BATCH_SIZE, 4, generator=generator)
            yield Batch(dense, features, (ids[0] < 100).int())


class Trained(LightningModule):
    """Hands Lightning's batches to the pipeline that the plan wants."""

    def __init__(self, model: tdsp.ModelParallel2D) -> None:
        super().__init__()
        self.automatic_optimization = False
        # No submodule: Lightning would move it, and it is on its device.
        self.pipeline = model.pipeline(torch.optim.Adagrad(model.dense_parameters(), lr=0.02))
        self.batches: Iterator[Batch] | None = None
        self.losses: list[float] = []

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        # One iterator for an epoch: the pipeline reads ahead.
        self.batches = self.batches or (batch for batch, _, _ in dataloader_iter)
        self.train_batch(self.batches)
        self.log("loss", self.losses[-1], prog_bar=True, batch_size=BATCH_SIZE)

    def train_batch(self, batches: Iterator[Batch]) -> None:
        loss, *_ = self.pipeline.progress(batches)
        self.losses.append(loss.item())

    def on_train_epoch_end(self) -> None:
        # Lightning's epoch ends with the log; the pipeline may still have batches.
        with suppress(StopIteration):
            while self.batches is not None and not self.trainer.should_stop:
                self.train_batch(self.batches)
        self.batches = None

    def configure_optimizers(self) -> None:
        """Leave optimizing to the pipeline."""


def shard() -> tdsp.ModelParallel2D:
    """Shard a model, which any loop can train."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=num_rows, embedding_dim=16, feature_names=[name]
        )
        for name, num_rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    return tdsp.parallelize(
        DLRMTrain(DLRM(collection, 4, [16], [16, 1])),
        batch_size=BATCH_SIZE,
        optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.02),
        sample=next(iter(Log())).sparse_features,
        calibration="emulated_1gbit",  # Leave it out, and your own ranks are measured.
    )


def fit(model: tdsp.ModelParallel2D) -> Trained:
    """Train in Lightning's loop."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,  # The ranks are torchrun's, and each has a trainer of its own.
        plugins=[LightningEnvironment()],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=dist.get_rank() == 0,
        enable_model_summary=False,
    )
    trained = Trained(model)
    trainer.fit(trained, DataLoader(Log(), batch_size=None))
    return trained


def main() -> None:
    dist.init_process_group("gloo")
    trained = fit(shard())
    if dist.get_rank() == 0:
        print(f"{len(trained.losses)} steps, the last loss is {trained.losses[-1]:.4f}")
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

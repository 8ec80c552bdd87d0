"""Train on a dataset of Hugging Face's `datasets`.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/hugging_face.py

Each rank reads its part of the rows, from memory, a local folder or the hub. All ranks need as many
batches: drop the rest, or pad it, where parts are unequal.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain

import torchrec_2dsp as tdsp

ROWS = {"user": 5_000, "tags": 500}
BATCH_SIZE, NUM_SAMPLES, EPOCHS = 64, 4_096, 2


def clicks() -> IterableDataset:
    """Return a log, of the type that `load_dataset(..., split="train", streaming=True)` gives."""
    generator = torch.Generator().manual_seed(0)
    users = torch.randint(ROWS["user"], (NUM_SAMPLES,), generator=generator)
    counts = torch.randint(4, (NUM_SAMPLES,), generator=generator)
    tags = torch.randint(ROWS["tags"], (int(counts.sum()),), generator=generator)
    log = {
        "user": users.tolist(),
        "tags": [part.tolist() for part in tags.split(counts.tolist())],
        "age": torch.rand(NUM_SAMPLES, generator=generator).tolist(),
        "clicked": (users % 3 == 0).int().tolist(),
    }
    return Dataset.from_dict(log).to_iterable_dataset(num_shards=8)


def batches(dataset: IterableDataset, epoch: int) -> Iterator[Batch]:
    """Yield this rank's batches in an epoch, in an order of its own."""
    shuffled = dataset.shuffle(seed=0, buffer_size=1_000)
    own = split_dataset_by_node(shuffled, dist.get_rank(), dist.get_world_size())
    in_batches = own.batch(BATCH_SIZE, drop_last_batch=True)
    # Of the last dataset made: what is made of another begins with epoch 0 again.
    in_batches.set_epoch(epoch)
    yield from map(make_batch, in_batches)


def make_batch(columns: Mapping[str, list[Any]]) -> Batch:
    """Convert a batch's columns."""
    ids = {"user": [[user] for user in columns["user"]], "tags": columns["tags"]}
    by_sample = list(chain.from_iterable(ids.values()))
    features = KeyedJaggedTensor(
        keys=list(ids),
        values=torch.tensor(list(chain.from_iterable(by_sample)), dtype=torch.int64),
        lengths=torch.tensor([len(sample) for sample in by_sample]),
    )
    return Batch(
        torch.tensor(columns["age"]).unsqueeze(1), features, torch.tensor(columns["clicked"])
    )


def train() -> list[float]:
    """Train a model on the log, and return its losses."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=num_rows, embedding_dim=16, feature_names=[name]
        )
        for name, num_rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    log = clicks()
    model = tdsp.parallelize(
        DLRMTrain(DLRM(collection, 1, [16], [16, 1])),
        batch_size=BATCH_SIZE,
        optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.1),
        sample=next(batches(log, 0)).sparse_features,
        calibration="emulated_1gbit",  # Leave it out, and your own ranks are measured.
    )
    pipeline = model.pipeline(torch.optim.Adagrad(model.dense_parameters(), lr=0.02))
    losses = []
    for epoch in range(EPOCHS):
        stream = batches(log, epoch)
        while True:
            try:
                loss, *_ = pipeline.progress(stream)
            except StopIteration:
                break
            losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    losses = train()
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps, from a loss of {losses[0]:.3f} to {losses[-1]:.3f}")
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

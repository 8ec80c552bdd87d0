"""Send each distinct row once, and most of them while the ranks compute.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/row_prefetch.py
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.streamable import Pipelineable

import torchrec_2dsp as tdsp

NUM_ROWS, BATCH_SIZE, STEPS = 10_000, 256, 20


@dataclass
class Batch(Pipelineable):
    """A batch that a pipeline can move."""

    features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.features.to(device, non_blocking), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> "Batch":
        return Batch(self.features.pin_memory(), self.labels.pin_memory())


class Model(nn.Module):
    """Looks one row up per item, under a dense layer; returns what pipelines expect."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t_item", num_embeddings=NUM_ROWS, embedding_dim=16, feature_names=["item"]
        )
        self.ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
        self.over = nn.Linear(16, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.over(self.ebc(batch.features)["item"]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.labels)
        return loss, loss.detach()


def batches(rank: int) -> Iterator[Batch]:
    """Make one id per sample, small ids much more often, and a label by the id."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        ids = (NUM_ROWS ** torch.rand(BATCH_SIZE, generator=generator)).long() - 1
        lengths = torch.ones(BATCH_SIZE, dtype=torch.int64)
        features = KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths)
        yield Batch(features, (ids % 2).float())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, device = Model(), torch.device("cpu")
    sharders = [tdsp.EmbeddingBagCollectionSharder2D(tdsp.MomentScaledRowWiseAdaGrad(lr=0.1))]
    planner = tdsp.Planner2D(
        mesh=tdsp.Mesh2D.for_world(dist.get_world_size(), group_size=4),
        sync=tdsp.GradientSync(),
        batch_size=BATCH_SIZE,
        constraints={"t_item": ParameterConstraints(sharding_types=["row_wise"])},
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    plan = tdsp.pin(plan, "t_item", exchange="row")
    plan = replace(plan, pipeline=tdsp.Pipeline.ROW_PREFETCH, full_duplex=True)
    parallel = tdsp.ModelParallel2D(model, device=device, plan=plan, sharders=sharders)

    pipeline = parallel.pipeline(torch.optim.SGD(parallel.dense_parameters(), lr=0.1))
    stream = batches(dist.get_rank())
    with tdsp.failing_together(parallel):
        for step in range(STEPS):
            loss = pipeline.progress(stream)
            if dist.get_rank() == 0 and step % 5 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""`evaluated`: a run's model on held-out batches, by the metrics of its kind."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_2dsp.comms.world_groups import world_group
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.models.kinds import has_clicks, ranking_of
from torchrec_2dsp.programs.models.model import rank_device
from torchrec_2dsp.programs.models.ranking_metrics import ranking_metrics
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.evaluation import ClickMetrics, Evaluation
from torchrec_2dsp.programs.train.stepping import closing_batches, evaluating


def evaluated(
    config: TrainConfig,
    model: DistributedModelParallel,
    batches_of: Callable[[Split], Iterator[Batch]],
    step: int,
) -> Evaluation:
    """Evaluate a model; the metrics are those of all ranks, and equal on all of them.

    Args:
        config: says what is evaluated, and on how many batches.
        model: the sharded model, in no pipeline.
        batches_of: gives this rank's batches of a split.
        step: how many steps were trained before.

    Collectives:
        Those of the model's lookups, of `ClickMetrics.gather` and of `ranking_metrics`.
    """
    world, device = world_group(), rank_device(config.loop.device)

    def held_out(batches: Iterator[Batch]) -> Iterator[Batch]:
        return (batch.to(device) for batch in islice(batches, config.loop.eval_steps or None))

    metrics = ClickMetrics(world, device)
    with closing_batches(batches_of(Split.EVAL)) as batches, evaluating(model):
        for batch in held_out(batches):
            _, (loss, scores, labels) = model(batch)
            metrics.add(loss, scores, labels)
    evaluation, ranking = metrics.gather(step), ranking_of(config.model)
    of_clicks = evaluation.metrics
    if not has_clicks(config.model):
        of_clicks = {"loss": of_clicks["loss"]}
    if ranking.among == "none":
        return replace(evaluation, metrics=of_clicks)
    with closing_batches(batches_of(Split.EVAL)) as batches, evaluating(model), torch.no_grad():
        rankings = ranking_metrics(model.module, held_out(batches), ranking, world)
    return replace(evaluation, metrics={**of_clicks, **rankings})

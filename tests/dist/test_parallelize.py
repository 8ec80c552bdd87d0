"""`parallelize` reports its choices and takes what fits; random cases train its plans."""

import re
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import are_equal, cpu_only, on_rank_device, rank_device, rounded
from tests.support.loops import LossModel, drain, plain_loop
from tests.support.models import SEQUENCES, ModelSpec, TableSpec, build, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import ONE, TOLERANCE
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp._compat.ddp import data_parallel_module
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.plan.serialize import save
from torchrec_2dsp.planner.search import cost_search
from torchrec_2dsp.programs.data.draws import Zipf

LARGE = ModelSpec(tuple(TableSpec(f"t{n}", 30_000, 64, (f"f{n}",)) for n in range(3)))
"""Large enough that the search wants row exchange."""
OTHERS = (TableSpec("other", 9, 4, ("other",)),)
ADAGRAD = tdsp.MomentScaledRowWiseAdaGrad(lr=0.05)


def parallelized(model: nn.Module, **known: Any) -> tdsp.ModelParallel2D:
    """Make a plan as a user would, on two emulated hosts, and run it."""
    return tdsp.parallelize(
        on_rank_device(model),
        device=rank_device(),
        batch_size=256,
        calibration="emulated_200mbit",
        mesh=ONE,
        **known,
    )


def train_by_pipeline_and_by_hand(rank: int, world_size: int) -> tuple[list[str], list[float], str]:
    """Return the choices, the losses, and the explanation."""
    losses: list[list[float]] = []
    chosen: list[str] = []
    reasons = ""
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = parallelized(LossModel(LARGE), optimizer=ADAGRAD)
        plan = cast(tdsp.Plan2D, model.plan)
        chosen = [plan.pipeline.value, str(plan.full_duplex)]
        chosen += [table.exchange.value for _, part in plan.modules() for _, table in part.tables()]
        optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.05)
        batches = [make_batch(LARGE, seed=10 * step + rank) for step in range(6)]
        if by_hand:
            losses.append(plain_loop(model, optimizer, batches))
        else:
            outputs = drain(model.pipeline(optimizer), batches)
            losses.append([local_loss(scores).item() for scores in outputs])
        try:
            reasons = "\n".join(model.explain().summary())
        except tdsp.errors.ConfigError as error:
            reasons = str(error)
    assert losses[0] == rounded(losses[1]), losses
    return chosen, losses[0], reasons


def test_it_chooses_rows_and_a_pipeline_and_says_so(two_hosts: RankPool) -> None:
    answers = two_hosts.run(train_by_pipeline_and_by_hand)
    for (pipeline, _, *exchanges), losses, _ in answers:
        assert pipeline in {Pipeline.SPARSE_DIST.value, Pipeline.ROW_PREFETCH.value}
        assert set(exchanges) <= {"row", "row_per_host"}
        assert len(set(losses)) == 6
    first, *others = (reasons for _, _, reasons in answers)
    lines = first.splitlines()
    assert lines[0].startswith("torchrec_2dsp: 3 row-wise, row")
    assert "a step should take" in lines[1]
    assert "Zipf" in lines[-1]
    assert all("this isn't rank 0" in reasons for reasons in others)


class DeepModel(LossModel):
    """A dense part whose layers' gradients arrive one after another."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        width = sum(table.dim for _, table in spec.features)
        hidden = [nn.Linear(width, width), nn.ReLU()]
        self.over: Any = nn.Sequential(*hidden, nn.Linear(width, width), nn.ReLU(), self.over)


def count_buckets(rank: int, world_size: int) -> tuple[list[int], list[list[float]]]:
    """Count dense gradients' buckets by default and as in TorchRec; return losses, too."""
    numbers, losses, spec = [], [], ModelSpec()
    for wrapper in (None, DefaultDataParallelWrapper()):
        torch.manual_seed(0)
        model = parallelized(DeepModel(spec), optimizer=ADAGRAD, data_parallel_wrapper=wrapper)
        optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.01)
        batches = [make_batch(spec, seed=10 * step + rank) for step in range(5)]
        losses.append(plain_loop(model, optimizer, batches))
        ddp = cast(Any, data_parallel_module(model))
        numbers.append(len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")))
    return numbers, losses


@cpu_only("TorchRec's buckets stay on GPUs")
def test_between_hosts_dense_gradients_set_out_before_the_backward_ends(
    two_hosts: RankPool, ranks4: RankPool
) -> None:
    for numbers, losses in two_hosts.run(count_buckets):
        assert numbers[0] > 1
        assert numbers[1] == 1
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert [numbers for numbers, _ in ranks4.run(count_buckets)] == [[1, 1]] * 4


def keep_weights_and_take_plans(
    rank: int, world_size: int, spec: ModelSpec, folder: str
) -> list[Any]:
    """Return whether weights were kept, and the errors for contradictory arguments."""
    model = build(spec, seed=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = parallelized(model, optimizer=ADAGRAD)
    path = str(Path(folder) / "plan.json")
    if rank == 0:
        save(cast(tdsp.Plan2D, first.plan), path)
    torch.distributed.barrier()
    filled = build(spec, device="meta").to_empty(device=rank_device())
    filled.load_state_dict(before)
    again = tdsp.parallelize(
        filled,
        device=rank_device(),
        batch_size=8,
        optimizer=ADAGRAD,
        plan=path,
    )
    kept: list[Any] = [again.plan == first.plan]
    other = build(spec, seed=4)
    batch = make_batch(spec, seed=rank)
    build_first = build(spec, seed=3)
    build_first.load_state_dict(before)
    unsharded = build_first.to(rank_device())(batch.to(rank_device()))
    kept += [are_equal(first(batch), unsharded), are_equal(again(batch), first(batch))]
    call: Any = partial(tdsp.parallelize, other, device=rank_device(), batch_size=8)
    both = {"optimizer": ADAGRAD, "sharders": tdsp.get_default_sharders()}
    kept += [error_text(partial(call, **wrong), tdsp.errors.ConfigError) for wrong in ({}, both)]
    return kept


def demands_of_one_rank(rank: int, world_size: int, folder: str) -> list[str]:
    """Return the errors for demands on only the last rank, or that contradict a plan."""
    plan = tdsp.Plan2D({}, mesh=ONE, sync=tdsp.GradientSync())
    is_last = rank == world_size - 1
    wrong: list[dict[str, Any]] = [
        {"calibration": str(Path(folder) / "none.toml") if is_last else "emulated_200mbit"},
        {"calibration": "emulated_200mbit", "precision": "int3" if is_last else "exact"},
        {"calibration": "emulated_200mbit", "mesh": tdsp.Mesh2D(3, 1) if is_last else None},
        {"calibration": "emulated_200mbit", "batch_size": 0 if is_last else 8},
        {"plan": plan, "mesh": ONE},
        {"plan": plan, "sync": tdsp.GradientSync()},
        {"plan": plan, "precision": "exact"},
        {"device": "no device" if is_last else "cpu", "calibration": "emulated_200mbit"},
        {"plan": str(Path(folder) / "none.json") if is_last else plan},
        {"plan": plan, "data_parallel_wrapper": tdsp.FullyShardedDense},
    ]
    known: dict[str, Any] = {"device": rank_device(), "batch_size": 8, "optimizer": ADAGRAD}
    calls = [partial(tdsp.parallelize, build(ModelSpec()), **known | demands) for demands in wrong]
    return [error_text(call, tdsp.TwoDError) for call in calls]


def allow_in_any_order(rank: int, world_size: int) -> bool:
    """Pass sets and dicts in another order on each rank, as string hashes do."""
    turn = 1 if rank else -1
    constraint = tdsp.ParameterConstraints2D(
        sharding_types=["row_wise", "table_wise"][::turn], exchange=["row", "nonempty"][::turn]
    )
    model = tdsp.parallelize(
        build(ModelSpec()),
        device=rank_device(),
        batch_size=8,
        optimizer=ADAGRAD,
        calibration="emulated_200mbit",
        precision=["fp32", "fp16"][::turn],
        exchange=["row", "pooled"][::turn],
        constraints=dict.fromkeys(["t0", "t2"][::turn], constraint),
    )
    return isinstance(model, tdsp.ModelParallel2D)


def test_what_is_allowed_has_no_order(two_hosts: RankPool) -> None:
    assert all(two_hosts.run(allow_in_any_order))


def shown_batches(rank: int, samples: int) -> list[KeyedJaggedTensor]:
    """Draw two batches with features for almost evenly used rows, uneven rows, and one lone id."""
    generator = np.random.default_rng(rank)
    batches: list[KeyedJaggedTensor] = []
    for seed in (2 * rank, 2 * rank + 1):
        lengths = [np.ones(samples, int), generator.integers(0, 9, samples), np.zeros(samples, int)]
        lengths[2][0] = 1
        skews = (0.3, 1.2, 1.0)
        ids = [
            Zipf(30_000, skew).sample(seed, np.arange(each.sum()))
            for skew, each in zip(skews, lengths, strict=True)
        ]
        batches.append(
            KeyedJaggedTensor(
                keys=["f0", "f1", "f2"],
                values=torch.from_numpy(np.concatenate(ids)),
                lengths=torch.from_numpy(np.concatenate(lengths)),
            ).to(rank_device())
        )
    return batches


def learn_from_a_sample(rank: int, world_size: int) -> tuple[Any, list[str]]:
    """Return the constraints from a sample, the explanation of a plan with it, and errors."""
    constraints: dict[str, ParameterConstraints] = {
        "t0": ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[4.0]),
        "t1": tdsp.ParameterConstraints2D(exchange="row"),
    }
    module, batches = build(LARGE, device="meta"), shown_batches(rank, 512)
    known: Any = tdsp.sampled_constraints(module, batches, constraints)
    alone = tdsp.sampled_constraints(module, batches[0], constraints)
    split = [batch.split([1, 1, 1]) for batch in batches]
    lacking = [split[0][0], split[1][1]]
    learned = {
        "pooling": [known[f"t{number}"].pooling_factors[0] for number in range(3)],
        "skew": [known[f"t{number}"].skew for number in range(3)],
        "differs": known["t0"].skew != cast(Any, alone["t0"]).skew,
        "kept": (
            known["t0"].sharding_types,
            known["t1"].exchange,
            constraints["t0"].pooling_factors,
        ),
        "lacking": list(tdsp.sampled_constraints(module, lacking)),
    }
    shown = parallelized(LossModel(LARGE), optimizer=ADAGRAD, sample=batches)
    reasons = "\n".join(shown.explain().summary()) if rank == 0 else ""
    on_some = None if rank else batches
    calls: list[Any] = [
        partial(tdsp.sampled_constraints, module, []),
        partial(tdsp.sampled_constraints, module, cast(Any, make_batch)),
        partial(tdsp.sampled_constraints, module, make_batch(ModelSpec(OTHERS), seed=0)),
        partial(parallelized, module, optimizer=ADAGRAD, sample=on_some),
    ]
    return learned, [reasons, *(error_text(call, tdsp.TwoDError) for call in calls)]


def test_a_sample_tells_ids_per_bag_and_how_unevenly_rows_are_used(two_hosts: RankPool) -> None:
    answers = two_hosts.run(learn_from_a_sample)
    learned, (reasons, empty, no_tensor, others, on_some) = answers[0]
    assert all(answer == learned for answer, _ in answers)
    assert learned["pooling"] == [4.0, pytest.approx(4.0, abs=0.2), pytest.approx(1 / 512)]
    assert learned["skew"] == [pytest.approx(0.3, abs=0.15), pytest.approx(1.2, abs=0.05), 1.05]
    assert learned["differs"]
    assert learned["kept"] == (["row_wise"], [tdsp.Exchange.ROW], [4.0])
    assert learned["lacking"] == ["t0", "t1"]
    assert re.search(r"Zipf exponents of 0\.\d\d to 1\.\d\d and", reasons)
    for _, (_, *errors) in answers:
        assert errors == [empty, no_tensor, others, on_some]
    assert "sample has no batch, or one without samples" in empty
    assert no_tensor == empty
    assert "sample has the features other, with which no table is complete" in others
    assert "whether there is a sample" in on_some


def plan_by_a_calibration_of_gpus(rank: int, world_size: int) -> tuple[list[str], float]:
    """Return the warnings, and a loss."""
    warnings = BufferingHandler(capacity=100)
    cost_search.logger.addHandler(warnings)
    try:
        model = tdsp.parallelize(
            build(ModelSpec()),
            device="cpu",
            batch_size=8,
            optimizer=ADAGRAD,
            calibration="h100_8_datasheet",
        )
    finally:
        cost_search.logger.removeHandler(warnings)
    loss = local_loss(model(make_batch(ModelSpec(), seed=rank)))
    return [record.getMessage() for record in warnings.buffer], loss.item()


@cpu_only("the calibration is of GPUs")
def test_a_calibration_of_other_devices_is_a_warning(two_hosts: RankPool) -> None:
    answers = two_hosts.run(plan_by_a_calibration_of_gpus)
    assert all(loss > 0 for _, loss in answers)
    (text,) = answers[0][0]
    assert text.startswith("calibration h100_8_datasheet is of other machines than those that are")
    assert text.endswith("tables are on cpu, and were on cuda")


def test_what_one_rank_gets_wrong_is_one_error_on_all(two_hosts: RankPool, tmp_path: Path) -> None:
    answers = two_hosts.run(demands_of_one_rank, str(tmp_path))
    for errors in zip(*answers, strict=True):
        assert len(set(errors)) == 1, errors
    file, precision, mesh, size, both, sync, exact, device, plan, wrapper = answers[0]
    assert "none.toml can't be read" in file
    assert "precision differs between ranks: rank 0 has exact, rank 3 has int3" in precision
    assert "Mesh2D(3x1" in mesh
    assert "batch_size" in size
    assert "plan and mesh are both given" in both
    assert "plan and sync are both given" in sync
    assert "plan and precision are both given" in exact
    assert "no device" in device
    assert "none.json can't be read" in plan
    assert "is no DataParallelWrapper; give an instance" in wrapper


@pytest.mark.parametrize("spec", [ModelSpec(), SEQUENCES], ids=["bags", "sequences"])
def test_weights_stay_plans_can_be_given_and_contradictions_are_refused(
    two_hosts: RankPool, spec: ModelSpec, tmp_path: Path
) -> None:
    for same_plan, same_scores, again, nothing, both in two_hosts.run(
        keep_weights_and_take_plans, spec, str(tmp_path)
    ):
        assert same_plan
        assert same_scores
        assert again
        assert "nothing says how tables are trained" in nothing
        assert "optimizer and sharders are both given" in both


def train_by_stock_sharders(rank: int, world_size: int, spec: ModelSpec) -> list[list[float]]:
    """Return the score sums with this package's optimizer and with TorchRec's own sharders."""
    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    bags = EmbeddingBagCollectionSharder(params)
    behind_weights = FeatureProcessedEmbeddingBagCollectionSharder(bags)
    stock = bags, EmbeddingCollectionSharder(params), behind_weights
    sums: list[list[float]] = []
    for known in ({"optimizer": ADAGRAD}, {"sharders": stock}):
        model = parallelized(build(spec, seed=3), exchange="row", **known)
        plan = cast(tdsp.Plan2D, model.plan)
        tables = [table for _, part in plan.modules() for _, table in part.tables()]
        assert {table.exchange.value for table in tables} <= {"row", "row_per_host"}
        sums.append([])
        for step in range(3):
            scores = model(make_batch(spec, seed=10 * step + rank))
            scores.sum().backward()
            model.sync()
            sums[-1].append(scores.sum().item())
    return sums


STOCK_SPECS = {
    "bags": ModelSpec(),
    "sequences": SEQUENCES,
    "positions": ModelSpec(weighted=True, positions="collection"),
}


@pytest.mark.parametrize("spec", STOCK_SPECS.values(), ids=STOCK_SPECS)
def test_torchrecs_own_sharders_train_as_this_packages(
    two_hosts: RankPool, spec: ModelSpec
) -> None:
    for ours, by_stock in two_hosts.run(train_by_stock_sharders, spec):
        assert ours == rounded(by_stock)
        assert len(set(ours)) == 3

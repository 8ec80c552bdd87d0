"""Sections on balanced batches: what they say, and which runs and contestants are refused."""

from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.bench_results import DEALT
from torchrec_2dsp.programs.bench.config import BenchConfig, StockContestant, is_reference, is_stock
from torchrec_2dsp.programs.cli.train_display import balance_text
from torchrec_2dsp.programs.config.config_file import make_config, overridden
from torchrec_2dsp.programs.config.sections import BalanceConfig, ModelConfig
from torchrec_2dsp.programs.models.balance import sample_lengths
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig
from torchrec_2dsp.programs.train.config import TrainConfig

CLICKS = {"data": {"features": [{"name": "user", "num_rows": 10}]}, "runs": {"dealt": {}}}
SEQUENCES = {
    "data": {"kind": "synthetic_sequences", "num_items": 50},
    "model": {"kind": "sequence", "loss_mean": "samples"},
}
TOWERS: dict[str, Any] = {
    "model": {"kind": "two_tower", "user_features": ["user"], "item_features": ["item"]}
}
OWN = {"model": {"kind": "module:factory", "factory": "package.module:function"}}
BENCH = {**SEQUENCES, "contestants": {"ddp": {"kind": "stock"}, "dealt": {"kind": "stock"}}}


def changed(*overrides: str, **sections: Any) -> TrainConfig:
    tree: dict[str, Any] = CLICKS | sections
    for override in overrides:
        tree = overridden(tree, override)
    return make_config(TrainConfig, tree)


def test_an_empty_section_deals_by_length() -> None:
    balance = changed("runs.dealt.balance={}").runs["dealt"].balance

    assert balance is not None
    assert balance.cost.sample_cost == tdsp.SampleCost()
    assert (balance.lengths, balance.shared_ids, balance.rank_speeds) == ((), 0.0, ())
    assert changed().runs["dealt"].balance is None


def test_all_keys_are_read() -> None:
    balance = (
        changed(
            "runs.dealt.balance.cost={ linear = 2, quadratic = 0.5 }",
            "runs.dealt.balance.lengths=['user']",
            "runs.dealt.balance.rank_speeds=measured",
            "runs.dealt.balance.smoothing=0.3",
            "runs.dealt.balance.shared_ids=0.05",
        )
        .runs["dealt"]
        .balance
    )

    assert balance is not None
    assert balance.cost.sample_cost == tdsp.SampleCost(linear=2.0, quadratic=0.5)
    assert balance.lengths == ("user",)
    assert (balance.rank_speeds, balance.smoothing) == ("measured", 0.3)
    assert balance.shared_ids == 0.05


KEY = "runs.dealt.balance"


@pytest.mark.parametrize(
    ("sections", "overrides", "message"),
    [
        (TOWERS, ["model.loss=in_batch"], "model.loss='in_batch' tells each item from the others"),
        (SEQUENCES, ["model.loss_mean=tokens"], "model.loss_mean='tokens' is the mean over the"),
        (OWN, [], "set balance.mean_over_samples=true if it is a mean over samples"),
        ({}, ["runs.dealt.dense.kind=local"], "dense.kind='local' lets each rank learn from its"),
        (
            SEQUENCES,
            ["runs.dealt.dense.kind=pipelined", f"{KEY}.rank_speeds=[1, 2]"],
            "the losses of all samples of a pipeline count alike, which dense.kind='pipelined'",
        ),
        (
            {},
            ["loop.device=cuda", f"{KEY}.rank_speeds=measured"],
            "rank_speeds='measured' measures processor time, which says nothing of device='cuda'",
        ),
    ],
)
def test_what_dealing_would_change_is_refused(
    sections: dict[str, Any], overrides: list[str], message: str
) -> None:
    loop = {"loop": {"steps": 32}}
    changed(*[override for override in overrides if KEY not in override], **sections, **loop)
    with pytest.raises(tdsp.errors.ConfigError) as raised:
        changed(f"{KEY}={{}}", *overrides, **sections, **loop)
    assert f"{KEY} deals samples to other ranks, and " in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("sections", "override"),
    [
        (TOWERS, f"{KEY}.shared_ids=0"),
        (SEQUENCES, f"{KEY}.rank_speeds=[1, 2]"),
        (SEQUENCES, f"{KEY}.cost.quadratic=1"),
        (OWN, f"{KEY}.mean_over_samples=true"),
    ],
)
def test_means_over_samples_are_dealt(sections: dict[str, Any], override: str) -> None:
    assert changed(override, **sections).runs["dealt"].balance is not None


def test_a_sequence_is_as_long_as_the_model_uses_it() -> None:
    features = KeyedJaggedTensor(
        keys=["item", "other"],
        values=torch.arange(12),
        lengths=torch.tensor([2, 5, 1, 2, 1, 1], dtype=torch.int32),
    )
    batch = Batch(torch.empty(3, 0), features, torch.ones(3))
    model = SequenceModelConfig(max_length=4)
    lengths = sample_lengths(BalanceConfig(), model)
    assert callable(lengths)
    assert lengths(batch).tolist() == [2, 4, 1]
    assert sample_lengths(BalanceConfig(lengths=("item",)), model) == ("item",)
    assert sample_lengths(BalanceConfig(), ModelConfig()) == ()


def test_contestants_have_the_same_section() -> None:
    config = make_config(BenchConfig, overridden(BENCH, "contestants.dealt.balance={}"))

    assert config.contestants["dealt"].describe().endswith(", samples dealt by cost")
    assert config.reference == "ddp"
    tokens = overridden(config.model_dump(mode="json"), "model.loss_mean=tokens")
    with pytest.raises(tdsp.errors.ConfigError, match=r"contestants\.dealt\.balance deals samples"):
        make_config(BenchConfig, tokens)
    speeds = overridden(BENCH, "contestants.dealt.balance.rank_speeds=[1, 2]")
    with pytest.raises(tdsp.errors.ConfigError, match="has 2 speeds for 4 ranks; give one for"):
        make_config(BenchConfig, speeds).check_world(4, 2)


def test_who_deals_samples_is_not_stock() -> None:
    contestant = make_config(StockContestant, {"balance": {}})
    assert not is_stock(contestant)
    assert not is_reference(contestant)


def test_a_run_says_how_even_its_work_was() -> None:
    assert balance_text(DEALT) == (
        "slowest rank by the mean, by the samples' costs:  1.500 as read, 1.100 as dealt  40% of "
        "the samples moved"
    )

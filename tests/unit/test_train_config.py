"""Training configs: reading, overrides, and error messages."""

import math
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.metrics.ne import compute_ne, get_ne_states

import torchrec_2dsp as tdsp
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.access import AccessConfig
from torchrec_2dsp.programs.config.config_file import load_config, make_config, overridden
from torchrec_2dsp.programs.train.checkpoints import RunSettings
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import normalized_entropy

MINIMAL: Mapping[str, Any] = {
    "data": {"features": [{"name": "user", "num_rows": 10}]},
    "runs": {"one": {}, "two": {"num_groups": 2, "sync": "WeightSync"}},
}


def changed(*overrides: str) -> TrainConfig:
    return make_config(TrainConfig, reduce(overridden, overrides, MINIMAL))


def test_the_demo_trains_one_group_exact_and_averaged() -> None:
    config = load_config(TrainConfig, "demo")

    config.check_world(4)
    assert {name: (run.num_groups, run.sync) for name, run in config.runs.items()} == {
        "one_group": (1, "GradientSync"),
        "exact": (2, "GradientSync"),
        "averaged": (2, "WeightSync"),
    }


def test_a_run_names_the_sync_config_class() -> None:
    runs = changed().runs

    assert runs["one"].sync_config == tdsp.GradientSync()
    assert runs["two"].sync_config == tdsp.WeightSync()
    averaged = changed("runs.two.sync_policy=after(10, every(4))").runs["two"].sync_config
    assert averaged == tdsp.WeightSync(policy=tdsp.after(10, tdsp.every(4)))


def test_the_mesh_follows_from_the_world() -> None:
    config = changed("runs.two.layout=contiguous")

    assert config.mesh("one", 4) == tdsp.Mesh2D(1, 4)
    assert config.mesh("two", 4) == tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)


def test_only_keeps_the_configs_order() -> None:
    config = changed()

    assert list(config.only(["two"]).runs) == ["two"]
    assert list(config.only(["two", "one"]).runs) == ["one", "two"]
    assert config.only([]) == config
    with pytest.raises(ConfigError, match="no run 'three'; the config has one, two"):
        config.only(["three"])


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("loop.steps=7", ("loop", "steps"), 7),
        ("data.signal = 0.5", ("data", "signal"), 0.5),
        ("loop.tensorboard_dir=runs/demo", ("loop", "tensorboard_dir"), "runs/demo"),
        ('loop.tensorboard_dir="7"', ("loop", "tensorboard_dir"), "7"),
        ("model.over_layers=[8, 4]", ("model", "over_layers"), [8, 4]),
        ("runs.new.num_groups=4", ("runs", "new", "num_groups"), 4),
        ("data.features.0.num_rows=3", ("data", "features", 0, "num_rows"), 3),
        ("a.b=x=y", ("a", "b"), "x=y"),
        ("a.b= x\t", ("a", "b"), "x"),
        ("data.delimiter=\t", ("data", "delimiter"), "\t"),
    ],
)
def test_overrides_reach_their_key(override: str, path: tuple[Any, ...], value: Any) -> None:
    before = str(MINIMAL)

    node: Any = overridden(MINIMAL, override)
    for part in path:
        node = node[part]

    assert node == value
    assert type(node) is type(value)
    assert str(MINIMAL) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loop.steps", "--set 'loop.steps' is not of the form key.sub=value"),
        ("=3", "--set '=3' is not of the form key.sub=value"),
        ("loop..steps=3", "is not of the form key.sub=value"),
        ("data.features.1.skew=0", "'1' is no item of a list of 1; use a number in 0..0"),
        ("data.features.x=0", "'x' is no item of a list of 1"),
        ("runs.two.sync.kind=0", "'WeightSync' has no key 'kind'"),
    ],
)
def test_overrides_that_lead_nowhere_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        overridden(MINIMAL, override)
    assert message in str(raised.value)


ROWS = "sharding_types=['row_wise'], exchange='row'"
SEQUENCES = ("data={kind='synthetic_sequences', num_items=50}", "model.kind=sequence")
LOG = "kind='criteo', files=['day_0.gz']"
RECUT = "runs.one.dense={kind='pipelined', recut_every=5"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("loop.steps=0", "loop.steps=0: input should be greater than or equal to 1"),
        ("loop.steps=true", "loop: steps=true is no number"),
        ("model.seed=9223372036854775808", "input should be less than 9223372036854775808"),
        ("loop.stepps=3", "loop.stepps is unknown; use one of steps, global_batch_size, "),
        ("loop.stepps=3", "tensorboard_dir (the nearest is 'steps')"),
        ("lop.steps=3", "lop is unknown; use one of data, model, optimizer, loop, checkpoint, "),
        ("lop.steps=3", "output, runs (the nearest is 'loop')"),
        (
            "zzz=3",
            "zzz is unknown; use one of data, model, optimizer, loop, checkpoint, output, runs",
        ),
        (
            "runs.one.groups=3",
            "runs.one.groups is unknown; use one of exchange, owners, row_transport, stored_as",
        ),
        ("data.kind=tabel", "data.kind='tabel': use one of 'synthetic'"),
        ("data.features.0.rows=3", "data.features.0.rows is unknown; use one of name, num_rows"),
        ("data.features.0.skew=-1", "data.features.0.skew=-1: input should be greater than or"),
        ("data.features.0.min_ids=2", "data.features.0: min_ids=2 is above max_ids=1"),
        ("data.features=[]", "data.features is too short; name at least 1"),
        ("optimizer.lr=inf", "optimizer.lr=inf: input should be a finite number"),
        ("loop.timeout_s=inf", "loop.timeout_s=inf: input should be less than or equal to 10000"),
        ("model.dim=6", "model.dim=6: input should be a multiple of 4"),
        ("model.sharding_types=['row']", "sharding type 'row' has no 2D form; use one of data_"),
        ("model.sharding_types=[]", "model.sharding_types is too short; name at least 1"),
        ("runs.two.sync=Sum", "sync='Sum': input should be 'GradientSync' or 'WeightSync'"),
        ("runs.two.sync_policy=every(0)", "every(0) is no interval; use every(1) or more"),
        ("runs.two.sync_policy=4", "runs.two.sync_policy=4: input should be a valid string"),
        ("runs.one.sync_policy=every(2)", "sync_policy='every(2)' is for WeightSync"),
        ("runs.one.dense_above=0.5", "dense_above=0.5 is for a WeightSync of touched rows"),
        ("runs.two.dense_above=2", "less than or equal to 1"),
        ("runs.two.layout=x", "runs.two.layout='x': input should be 'strided' or 'contiguous'"),
        ("runs.two.exchange=x", "exchange='x': input should be 'pooled', 'nonempty', 'row' or"),
        ("runs.two.owners=hash", "owners='hash' is for an exchange of rows; set exchange='row'"),
        ("runs.two.sharding_types=['row']", "sharding type 'row' has no 2D form"),
        ("runs.two=3", "runs.two=3: input should be"),
        ("runs={}", "runs is too short; name at least 1"),
        ("runs={'a b'={}}", "runs: the name 'a b' has a dot, a slash or a space"),
        ("loop.accumulate=3", "accumulate=3 does not divide global_batch_size=1024"),
        ("loop.metric=calibration", "loop.metric='calibration' isn't computed for"),
        (
            (*SEQUENCES, "loop.metric=auc"),
            "loop.metric='auc' isn't computed for model.kind='sequence'; use one",
        ),
        ("loop.eval_steps=0", "loop.eval_steps=0 evaluates on all held-out batches"),
        ("optimizer.schedule.kind=step", "kind='step' needs step_every"),
        (
            ("loop.accumulate=2", f"runs.one={{{ROWS}, prefetch_rows=true}}"),
            "runs.one.prefetch_rows is for a pipeline",
        ),
        (
            ("loop.eval_every=3", "runs.one.dense={kind='local', local_steps=4}"),
            "runs.one.dense.local_steps=4 doesn't divide loop.eval_every=3",
        ),
        (
            "runs.one.dense.kind=planned",
            '"planned" is for models with a LayerStack, and model.kind',
        ),
        ((*SEQUENCES, "runs.one.dense.kind=planned"), "needs to know the machines"),
        (
            (*SEQUENCES, "loop.device=cuda", "runs.one.dense={kind='pipelined', recut_every=5}"),
            "runs.one.dense.recut_every=5 chooses cuts by the layers' times, and on a GPU only",
        ),
        ("runs.one={calibration='emulated_1gbit', hot_rows=3}", "hot_rows=3 can't be given as"),
        (
            "runs.one={calibration='emulated_1gbit', prefetch_rows=true}",
            "prefetch_rows=True can't be given as well: the planner chooses",
        ),
        ("runs.one={plan='p.json', hot_rows=2}", "hot_rows=2 can't be given as well: plan='p."),
        ("runs.one={access='stats', num_groups=2}", "access='stats' is for a plan by cost and for"),
        ("runs.one={stock=true, num_groups=2}", "num_groups=2 is this package's"),
        ("runs.one={stock=true, exchange='row'}", "exchange='row' is this package's"),
        (
            ("loop.accumulate=2", "runs.one.stock=true"),
            "runs.one is TorchRec alone, whose tables learn in each backward, and a step of "
            "loop.accumulate=2",
        ),
        (
            ("model={kind='module:factory', factory='mine:make'}", "runs.one.stock=true"),
            "runs.one is TorchRec alone, which draws tables anew, and those of model.kind='module:",
        ),
        # Keys that nothing reads.
        ("runs.one.dense.density=0.1", "dense: density=0.1 is for kind='thresholded', and"),
        ("runs.one.dense={kind='fp16', rank=4}", "rank=4 is for kind='powersgd', and kind is"),
        ("runs.one.dense={kind='delayed', tp=2}", "'tensor_parallel' or 'pipelined', and kind"),
        ("runs.one.dense.recut_every=5", "recut_every=5 is for kind='pipelined', and kind is"),
        (f"{RECUT}, fully_shard=true}}", "ranks have parts of them"),
        (f"{RECUT}, tp=2}}", "ranks have parts of them"),
        ("runs.one.sync=WeightSync", "sync='WeightSync' is for copies of the tables, and"),
        ("runs.one.layout=contiguous", "layout='contiguous' is for copies of the tables"),
        ("runs.one.drift_every=5", "drift_every=5 is for copies of the tables"),
        ("runs.two={num_groups=2, synced_rows='all'}", "synced_rows='all' is for WeightSync"),
        ("loop.patience=2", "patience=2 counts evaluations; set eval_every"),
        ("optimizer.schedule.final=0.5", "final=0.5 is for kind='linear' or 'cosine'"),
        ("checkpoint.every=5", "checkpoint: every=5 is for checkpoints; set folder, or leave"),
        ("checkpoint={folder='x', keep_best=3}", "keep_best=3 is for loop.eval_every"),
        ("output.folder=s3://x/y", "folder=s3://x/y is an address; give a local folder"),
        ("output.traced_steps=3", "traced_steps=3 is for the output folder; set folder"),
        ("data.interaction_rank=4", "data: interaction_rank=4 is for interaction_share"),
        (f"data={{{LOG}, min_count=3}}", "data: min_count=3 is for encoding='vocabulary'"),
        (f"data={{{LOG}, seed=3}}", "data: seed=3 is for shuffled_blocks"),
        (
            f"data={{{LOG}, held_out={{by='files', files=['a.gz'], share=0.5}}}}",
            "data.held_out: share=0.5 is for by='last' or 'hash'",
        ),
        (
            "model={kind='sequence', ranking={among='sampled', exclude_seen=true}}",
            "model.ranking: exclude_seen=True is for among='all'",
        ),
        ("model={kind='sequence', ranking={k=[10, 0]}}", "model.ranking.k.1=0: input should be"),
        ("optimizer.rounding_seed=3", "rounding_seed=3 is for stochastic_rounding=true; set it"),
        (
            "optimizer.stochastic_rounding=true",
            "optimizer.stochastic_rounding=True is for tables in 16 or 8 bits; set",
        ),
        (
            "model={kind='module:factory', factory='a:b', table_dtype='fp16'}",
            "table_dtype='fp16' is for kind='dlrm' or 'dcn' or 'sequence' or 'two_tower', and kind",
        ),
        (
            "runs.two.dense={kind='pipelined', autocast='bf16'}",
            "autocast='bf16' is for kind='ddp' or 'fp16' or 'powersgd' or 'thresholded' or "
            "'delayed' or 'fully_sharded' or 'tensor_parallel' or 'local', and kind is 'pipelined'",
        ),
    ],
)
def test_errors_name_key_value_and_rule(overrides: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changed(*([overrides] if isinstance(overrides, str) else overrides))
    assert str(raised.value).startswith("config: ")
    assert message in str(raised.value)


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[loop]\nsteps = 0\n[data]\nfeatures = [{ name = 'f' }]\n")

    with pytest.raises(ConfigError) as raised:
        load_config(TrainConfig, path)

    assert str(raised.value).splitlines() == [
        f"{path}: data.features.0.num_rows is missing; write it into the config, or use --set "
        "data.features.0.num_rows=...",
        "  loop.steps=0: input should be greater than or equal to 1",
        "  runs is missing; write it into the config, or use --set runs=...",
    ]


def test_a_run_folder_of_an_earlier_version_is_read(caplog: pytest.LogCaptureFixture) -> None:
    former = {"num_groups": 2, "moment_rho": 0.01, "moment_scale": "expected"}
    tree = {**MINIMAL, "runs": {"one": former}}
    assert make_config(TrainConfig, tree) == changed("runs={one={num_groups=2}}")
    assert "moment_scale='expected' is gone" in caplog.text


def test_a_section_that_does_not_name_its_kind_is_told_the_kinds() -> None:
    with pytest.raises(ConfigError, match=r"data\.kind is missing; use one of avazu, criteo"):
        make_config(AccessConfig, {"data": {"files": "log.csv"}})


@pytest.mark.parametrize(
    ("world_size", "override", "message"),
    [
        (
            6,
            "runs.two.num_groups=4",
            "runs.two.num_groups=4 does not divide the 6 ranks; use one of 1, 2, 3, 6, or start",
        ),
        (
            4,
            "loop.global_batch_size=6",
            "loop.global_batch_size=6 is not a multiple of the 4 ranks; use 8",
        ),
    ],
)
def test_what_does_not_fit_the_world_is_refused(
    world_size: int, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(override).check_world(world_size)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "can't be read: No such file"), ("steps = = 3", "is not TOML: Invalid value")],
)
def test_unreadable_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, path)


def test_normalized_entropy_is_torchrecs() -> None:
    labels, predictions = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0]]), torch.rand(1, 5)
    states = get_ne_states(labels, predictions, torch.ones(1, 5), eta=1e-12)
    expected = compute_ne(
        states["cross_entropy_sum"],
        states["weighted_num_samples"],
        states["pos_labels"],
        states["neg_labels"],
        eta=1e-12,
    )

    loss = torch.nn.functional.binary_cross_entropy(predictions.double(), labels.double()).item()

    assert normalized_entropy(loss, click_rate=0.4) == pytest.approx(expected.item())
    assert math.isnan(normalized_entropy(loss, click_rate=0.0))


@pytest.mark.parametrize("override", ["dense_optimizer=adam", "dense_clip_norm=1.0"])
def test_updates_are_for_sgd_without_clipping(override: str) -> None:
    updates = "runs.one.dense={kind='thresholded', preconditioner='adam'}"
    assert changed(updates).optimizer.dense_optimizer == "sgd"
    with pytest.raises(ConfigError, match="gives updates instead of gradients"):
        changed(updates, f"optimizer.{override}")


@pytest.mark.parametrize(
    ("model", "is_refused"),
    [
        ({}, True),
        ({"kind": "two_tower", "user_features": ["a.b"], "item_features": ["c/d"]}, True),
        ({"kind": "two_tower", "user_features": ["user"], "item_features": ["c/d"]}, False),
        ({"kind": "module:factory", "factory": "mine:make"}, False),
    ],
)
@pytest.mark.parametrize("kind", ["synthetic", "table"])
def test_a_feature_whose_table_cannot_be_named_is_refused(
    kind: str, model: dict[str, Any], is_refused: bool
) -> None:
    features = [{"name": name, "num_rows": 9} for name in ("user", "a.b", "c/d")]
    log = {"kind": kind, "files": ["log.csv"], "label": "label"} if kind == "table" else {}
    tree = {**MINIMAL, "data": {**log, "features": features}, "model": model}
    if not is_refused:
        assert make_config(TrainConfig, tree).data.kind == kind
        return
    with pytest.raises(ConfigError, match=r"feature 'a\.b' has a dot, which no table"):
        make_config(TrainConfig, tree)


def test_types_are_among_the_settings_that_a_resumed_run_keeps() -> None:
    # Older checkpoints lack these keys.
    assert not RunSettings(changed(), "two").state_dict().keys() & {
        "model.table_dtype",
        "optimizer.stochastic_rounding",
        "optimizer.rounding_seed",
    }
    model, optimizer = {"table_dtype": "fp16"}, {"stochastic_rounding": True, "rounding_seed": 2}
    config = make_config(TrainConfig, {**MINIMAL, "model": model, "optimizer": optimizer})
    settings = RunSettings(config, next(iter(config.runs))).state_dict()
    assert settings["model.table_dtype"] == '"fp16"'
    assert settings["optimizer.stochastic_rounding"] == "true"
    assert settings["optimizer.rounding_seed"] == "2"


def test_torchrec_alone_does_not_round_alike() -> None:
    model, optimizer = {"table_dtype": "fp16"}, {"stochastic_rounding": True}
    tree = {**MINIMAL, "model": model, "optimizer": optimizer}
    assert make_config(TrainConfig, tree).model.kind == "dlrm"
    stock = {"runs": {"two": {"stock": True}}}
    with pytest.raises(ConfigError, match="TorchRec alone, which doesn't round"):
        make_config(TrainConfig, {**tree, **stock})
    in_bf16 = {**MINIMAL, "model": {"table_dtype": "bf16"}, **stock}
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match="TorchRec alone, which can't look up"):
            make_config(TrainConfig, in_bf16 | {"loop": {"device": device}})


def test_a_list_with_a_wrong_item_is_not_too_short() -> None:
    features = [{"name": "user", "num_rows": 1}]
    log = {"kind": "table", "files": ["log.csv"], "label": "label", "features": features}
    with pytest.raises(ConfigError) as raised:
        make_config(TrainConfig, {**MINIMAL, "data": log})
    assert "num_rows=1 leaves no row for hashed values" in str(raised.value)
    assert "at least 1 item" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"data\.features is too short"):
        make_config(TrainConfig, {**MINIMAL, "data": {**log, "features": []}})

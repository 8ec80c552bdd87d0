"""Draw a case from a seed.

To add something that a user can vary: give it a field in `tests.fuzz.case` whose default is the
plainest value, and a line in one of the tables below. Where values don't go together by the
documents, `_settled` says so; what the code refuses by name may stay, as long as it is rare. Then
let `run` and `oracle` follow the field.
"""

import random
from dataclasses import replace
from typing import Any

from tests.fuzz.actions import EVENTS
from tests.fuzz.case import (
    HASHED_POLICIES,
    Case,
    DenseCase,
    ModuleCase,
    SearchCase,
    SyncCase,
    TableCase,
)
from tests.fuzz.state import ADAMS
from tests.support.devices import on_gpus

MESHES = ((1, 2), (2, 1), (1, 4), (1, 4), (2, 2), (2, 2), (4, 1))
"""Groups and ranks per group; repeated entries are drawn more often."""

CASE_CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": ("strided", "contiguous"),
    "joined": (False, True),
    "optimizer": ("sgd", "adagrad", "rowwise_adagrad", "moment_scaled", "adam", "partial_adam"),
    "at_random": (False, True),
    "wrapper": ("2d", "2d", "2d", "stock"),
    "has_nan": (False,) * 24 + (True,),
    "form": ("plain",) * 5 + ("column", "cut", "offsets", "expanded", "int32", "rotated"),
    "built_anew": (False, False, False, True),
    "stray_weights": (False, False, False, False, True),
    "zero_grad": ("before", "after", "between", "zeros"),
    "loop": ("plain", "plain", "sparse_dist", "row_prefetch", "row_prefetch"),
    "evaluates_in_pipeline": (False, False, True),
    "evaluates_in_step": (False, False, False, True),
    "sync_call": ("before", "after", "none"),
    "accumulated": (1, 1, 1, 1, 2, 3),
    "steps": (1, 2, 3, 4, 5),
    "rotated": (False, True),
    "variable": (False, False, False, True),
    "max_length": (1, 2, 4, 9),
    "skew": (0.0, 1.0, 3.0),
    "bad_ids": ("raise", "drop", "clamp"),
    "has_bad_ids": (False, False, False, True),
    "full_duplex": (False, True),
    "qcomms": ("none",) * 9 + ("fp16",),
}
SYNC_CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": ("gradient", "weight"),
    "transport": ("fp32",) * 12 + ("bf16", "fp16", "int8", "int4"),
    "delay": (0, 0, 1),
    "policy": ("every(1)", "every(1)", "every(2)", "after(1, every(2))", "never()"),
    "moments_policy": ("", "", "every(1)", "every(3)", "never()"),
    "rows": ("touched", "touched", "all"),
    "dense_above": (None, None, 0.0, 0.3, 1.0),
    "drift_every": (0, 0, 1, 2),
}
SEARCH_CHOICES: dict[str, tuple[Any, ...]] = {
    "calibration": ("emulated_200mbit", "emulated_1gbit", "emulated_no_limit"),
    "link_factor": (1.0, 1.0, 0.01, 100.0),
    "kernel_factor": (1.0, 1.0, 0.0, 100.0),
    "precision": (("exact",),) * 5 + (("any",), ("fp16",), ("bf16", "int8"), ("int4",)),
    "exchange": ((), (), (), ("row",), ("row", "row_per_host"), ("nonempty", "pooled")),
    "has_mesh": (False, False, True),
    "access": ("none", "first", "all", "all"),
    "batch_size": (1, 8, 512, 65_536),
    "keeps_weights": (False, True),
    "gives_sharders": (False, True),
}
DENSE_CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": (
        ("ddp",) * 4
        + ("fp16", "thresholded", "thresholded", "fully_sharded", "delayed", "local")
        + ("tensor_parallel", "pipelined", "pipelined")
    ),
    "hidden": ((), (), (4,), (6, 4)),
    "shortcut": (False, False, False, True),
    "optimizer": ("sgd", "sgd", "adagrad", "adam"),
    "clip": (0.0, 0.0, 0.3),
    "warm_up": (0, 1, 1, 2, 3),
    "density": (1.0, 0.05, 0.3),
    "values": ("fp32", "bf16", "int8", "int4"),
    "route": ("auto", "gather", "owners"),
    "refresh": (1, 1, 2, 3),
    "exact_thresholds": (False, True),
    "small_buckets": (False, True),
    "num_copies": (1, 1, 2),
    "schedule": ("1F1B", "GPipe"),
    "num_micro_batches": (1, 2, 3),
    "layout": ("contiguous", "strided"),
    "fully_shard": (False, False, True),
    "local_steps": (1, 2, 3),
    "residual_decay": (1.0, 1.0, 0.5),
}
MODULE_CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": ("bags", "bags", "weighted", "positions", "sequences"),
    "frozen_positions": (False, False, False, True),
    "by_feature": (False, True),
    "again": (False, False, False, True),
    "in_place": (False, False, False, True),
    "leaves_out": (False, False, True),
    "evicts": ("",) * 12 + ("lfu", "lru", "distance", *HASHED_POLICIES),
    "interval": (1, 1, 2, 3),
    "drift": (0, 1, 5),
    "id_step": (1, -3, 2**40 + 1, 2**56 + 1),
}
TABLE_CHOICES: dict[str, tuple[Any, ...]] = {
    "rows": (1, 1, 2, 3, 5, 8, 16, 40, 97, 400),
    "dim": (4, 8, 12, 16),
    "pooling": ("sum", "mean"),
    "dtype": ("fp32",) * 6 + ("fp16", "bf16", "int8"),
    "sharding": (
        ("row_wise",) * 5
        + ("table_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard")
        + ("data_parallel",)
    ),
    "place": (0, 1, 2, 3),
    "exchange": ("pooled", "pooled", "nonempty", "row", "row_per_host"),
    "transport": ("fp32",) * 24 + ("bf16", "fp16", "int8", "int8", "int4", "int4"),
    "owners": ("block", "hash"),
    "hot": ("none", "none", "some", "all"),
    "once": (False, False, True),
    "frozen": (False,) * 7 + (True,),
    "demand": ("none",) * 7 + ("sharding", "exchange", "transport", "hot", "once"),
}
BATCH_SIZES = (0, 1, 2, 3, 4, 6, 6)
NUM_MODULES = (1, 1, 2, 3)
NUM_TABLES = (1, 2, 2, 3)
NUM_EVENTS = (0, 1, 1, 2, 3)
ALIKE = ("sharding", "exchange", "transport", "owners", "dtype", "pooling", "once")
"""The fields that tables of one kernel share."""
ALIKE_SHARE = 0.5
"""The share of modules whose tables have one kernel."""
SEARCHED_SHARE = 0.15
"""The share of cases with a plan that `parallelize` makes."""
EXACT_SHARE = 0.5
"""The share of cases that round nothing: the ranks' numbers are known but for float32."""
UNSETTLED_SHARE = 0.03
"""The share of cases that keep combinations likely to be refused."""


def draw_case(seed: int) -> Case:
    """Draw a seed's case: always the same one on the same kind of device."""
    rng = random.Random(f"case {seed}")
    groups, size = rng.choice(MESHES)
    world = groups * size
    modules = tuple(_drawn_module(rng) for _ in range(rng.choice(NUM_MODULES)))
    chosen = _chosen(rng, CASE_CHOICES)
    events = sorted(
        (rng.randrange(chosen["steps"]), rng.choice(EVENTS)) for _ in range(rng.choice(NUM_EVENTS))
    )
    case = Case(
        groups=groups,
        size=size,
        local=rng.choice([0, *(number for number in (1, 2) if world % number == 0)]),
        modules=modules,
        sync=SyncCase(**_chosen(rng, SYNC_CHOICES)),
        search=_drawn_search(rng),
        dense=DenseCase(**_chosen(rng, DENSE_CHOICES)),
        sizes=tuple(rng.choice(BATCH_SIZES) for _ in range(world)),
        events=tuple(events),
        seed=rng.randrange(1_000),
        **chosen,
    )
    if on_gpus():
        # Each rank counts as a host, and FBGEMM's CUDA kernel can't cut a batch without samples.
        case = replace(case, local=1, sizes=tuple(max(1, number) for number in case.sizes))
    if rng.random() < EXACT_SHARE:
        case = _exact(case)
    settled_case = settled(case)
    if case.search is not None or case.has_nan or rng.random() >= UNSETTLED_SHARE:
        return settled_case
    if case.loop == "sparse_dist" and any(module.again for module in case.modules):
        # TorchRec's own pipeline refuses it, by an assertion.
        return settled_case
    # TorchRec itself fails without samples, and names nothing; an idle shortcut isn't refused, and
    # what comes between steps may be possible after one more.
    return replace(
        case, sizes=settled_case.sizes, dense=settled_case.dense, events=settled_case.events
    )


def _exact(case: Case) -> Case:
    """Return the case with all numbers in float32, both stored and sent."""
    modules = tuple(
        replace(
            module,
            tables=tuple(replace(part, transport="fp32", dtype="fp32") for part in module.tables),
        )
        for module in case.modules
    )
    kind = "ddp" if case.dense.kind == "fp16" else case.dense.kind
    return replace(
        case,
        modules=modules,
        sync=replace(case.sync, transport="fp32"),
        search=case.search and replace(case.search, precision=("exact",)),
        dense=replace(case.dense, kind=kind, values="fp32"),
        qcomms="none",
    )


def _drawn_search(rng: random.Random) -> SearchCase | None:
    search = SearchCase(**_chosen(rng, SEARCH_CHOICES))
    return search if rng.random() < SEARCHED_SHARE else None


_MANY_ROWS = 16
"""Row-wise tables with fewer may have a shard of one row, which is refused."""


def settled(case: Case) -> Case:
    """Return the case without combinations that the documents exclude."""
    if case.has_nan:
        case = _settled_nan(case)
    if case.has_maps:
        # Rows that begin anew take no late updates; a refused batch is seen by some maps only.
        sync, bad_ids = replace(case.sync, delay=0), case.bad_ids.replace("raise", "drop")
        case = replace(case, sync=sync, bad_ids=bad_ids, accumulated=1)
    if case.search is not None:
        # Only sharders know these.
        by_sharders = case.bad_ids != "raise" or case.accumulated > 1 or case.at_random
        search = replace(
            case.search,
            gives_sharders=case.search.gives_sharders or by_sharders,
            keeps_weights=case.search.keeps_weights and not case.has_maps,
        )
        case = replace(case, search=search, wrapper="2d", qcomms="none")
    has_sequences = any(module.kind == "sequences" for module in case.modules)
    sizes = tuple(max(1, size) for size in case.sizes) if has_sequences else case.sizes
    has_bad_ids = case.has_bad_ids and not (case.bad_ids == "raise" and case.sync.delay)
    transports = {case.sync.transport, *(table.transport for table in case.tables.values())}
    rounds = case.search is not None and case.search.precision != ("exact",)
    rounds |= transports != {"fp32"} or case.qcomms != "none"
    if case.optimizer in ADAMS and rounds:
        # The oracle loses there which rows without a gradient were looked up.
        case = replace(case, optimizer="adagrad")
    if case.optimizer == "partial_adam" and min(t.rows for t in case.tables.values()) < _MANY_ROWS:
        case = replace(case, optimizer="adam")
    return replace(
        case,
        modules=tuple(_settled_module(case, module) for module in case.modules),
        sync=_settled_sync(case),
        dense=_settled_dense(case.dense, case),
        # TorchRec's sequences need a sample.
        sizes=sizes,
        # A refused batch is looked up in part, which lets delayed updates come early.
        has_bad_ids=has_bad_ids,
        form="plain" if case.form == "offsets" and case.variable else case.form,
        zero_grad=_settled_zero_grad(case),
        # TorchRec's can't run a module twice.
        evaluates_in_pipeline=case.evaluates_in_pipeline
        and not any(module.again for module in case.modules),
        evaluates_in_step=case.evaluates_in_step and case.loop == "plain",
        events=tuple(event for event in case.events if _may_happen(case, event[1])),
    )


def _settled_nan(case: Case) -> Case:
    """Return a case in which each rank's row gradients reach a replica peer in the same step."""
    first, *others = case.modules
    tables = [replace(table, once=False, frozen=False) for table in first.tables]
    are_sent = all(table.sharding != "data_parallel" for table in tables)
    if case.groups == 1 or case.sync.kind != "gradient" or not are_sent:
        return replace(case, has_nan=False)
    modules = (replace(first, tables=tuple(tables)), *others)
    return replace(
        case,
        search=None,
        modules=tuple(replace(module, evicts="", leaves_out=False) for module in modules),
        sync=replace(case.sync, delay=0),
        dense=Case().dense,
        loop="plain",
        events=(),
        has_bad_ids=False,
    )


def _may_happen(case: Case, event: str) -> bool:
    """Tell whether the documents allow this event between two steps.

    Ranks that haven't met have different weights, and a checkpoint would keep only some.
    """
    if event in ("peek", "abandon"):
        # A pipeline's forward adds to gradients already.
        takes = case.loop == "plain" and case.dense.kind != "pipelined"
        # Under `no_sync`, torch's DDP goes on with an abandoned forward: its unused parameters,
        # and a reduction after the next batch.
        goes_on = case.dense.shortcut or case.dense.kind == "thresholded"
        is_stale = event == "abandon" and case.accumulated > 1 and goes_on
        return takes and not is_stale
    if event.startswith("unfreeze"):
        # Pipelines and their optimizers would have to be rebuilt.
        return case.loop == "plain" and case.wrapper == "2d" and bool(case.unfreezable)
    if event == "load" and any("unfreeze" in kind for _, kind in case.events):
        # The earlier checkpoint has another optimizer state.
        return False
    if case.has_maps and case.loop != "plain" and "load" in event:
        # Maps that have seen a pipeline's next batch can't be replaced.
        return False
    return not (case.dense.is_apart and event in ("save", "save_load", "load"))


def _settled_zero_grad(case: Case) -> str:
    """Return "before" where keeping or zeroing gradients would change the training."""
    is_other = case.loop != "plain" or (case.dense.shortcut and case.zero_grad == "zeros")
    return "before" if is_other else case.zero_grad


def _settled_sync(case: Case) -> SyncCase:
    sync = case.sync
    if sync.rows == "all":
        sync = replace(sync, transport="fp32", dense_above=None)
    if case.optimizer == "sgd":
        sync = replace(sync, moments_policy="")
    return sync


_ONLY_OVER_TABLES = ("fully_sharded", "tensor_parallel", "pipelined", "local")
"""Dense kinds that refuse parameters which a sharded module trains beside its tables."""


def _settled_dense(dense: DenseCase, case: Case) -> DenseCase:
    if dense.kind in _ONLY_OVER_TABLES and any(m.trains_positions for m in case.modules):
        dense = replace(dense, kind="ddp")
    if dense.kind == "tensor_parallel":
        tp = 2 if case.local_world_size % 2 == 0 else 1
        num_groups = case.world_size // tp
        dense = replace(
            dense,
            hidden=dense.hidden or (4,),
            tp=tp,
            num_copies=min(dense.num_copies, num_groups),
        )
    if dense.kind == "pipelined":
        dense = replace(dense, hidden=dense.hidden or (4,))
    # FSDP2 needs all ranks' gradients; Adam's step depends on whether a gradient is zero or absent.
    may_skip = dense.kind != "fully_sharded" and dense.optimizer != "adam"
    return replace(
        dense,
        warm_up=max(1, dense.warm_up) if dense.kind == "delayed" else dense.warm_up,
        shortcut=dense.shortcut and may_skip,
    )


def _settled_module(case: Case, module: ModuleCase) -> ModuleCase:
    users = [feature for table in module.tables for feature in table.features]
    if len(set(users)) < len(users):
        module = replace(module, evicts="")
    module = replace(
        module,
        again=module.again and _may_look_up_again(case, module),
        in_place=module.in_place and module.kind != "sequences",
        # A loss must reach a table that is trained.
        leaves_out=module.leaves_out
        and module.kind == "sequences"
        and module.num_outputs > 1
        and not any(table.frozen for table in module.tables),
    )
    tables = []
    for table in module.tables:
        if case.search is None:
            table = replace(table, demand="none")
        if module.kind == "sequences":
            kinds = ("table_wise", "column_wise", "row_wise", "data_parallel")
            if table.sharding not in kinds:
                table = replace(table, sharding="table_wise")
        if module.kind != "bags":
            table = replace(table, pooling="sum")
        is_shared = any(users.count(feature) > 1 for feature in table.features)
        tables.append(_settled_table(case, module, table, is_shared=is_shared))
    return replace(module, tables=tuple(tables))


def _may_look_up_again(case: Case, module: ModuleCase) -> bool:
    """Tell whether a second lookup is allowed: both make one update, and nothing counts them."""
    is_copied = case.groups > 1 and not any(table.once for table in module.tables)
    is_captured = is_copied and case.sync.kind == "gradient" and case.search is None
    adds_up = case.accumulated > 1 or case.optimizer == "sgd" or is_captured
    counts = module.evicts or case.has_bad_ids
    return adds_up and not counts and case.loop == "plain"


def _settled_table(
    case: Case, module: ModuleCase, table: TableCase, *, is_shared: bool
) -> TableCase:
    by_bags = ("table_wise", "column_wise", "table_column_wise", "row_wise")
    nonempty = table.sharding in by_bags and module.kind != "sequences"
    allowed = {
        "pooled": True,
        "nonempty": nonempty,
        "row": table.sharding == "row_wise",
        "row_per_host": table.sharding == "row_wise",
    }
    exchange = table.exchange if allowed[table.exchange] else "pooled"
    if table.dtype == "int8":
        # Rows in 8 bits are whole, aren't averaged, and lie where state dicts show them.
        by_rows = table.sharding in ("row_wise", "table_wise", "table_row_wise")
        is_averaged = case.sync.kind == "weight" and case.groups > 1
        can_be = by_rows and not is_averaged and case.search is None
        table = replace(table, dtype="int8" if can_be else "fp32")
    may_be_hot = table.sharding != "data_parallel" and not is_shared
    return replace(
        table,
        exchange=exchange,
        transport="fp32" if table.sharding == "data_parallel" else table.transport,
        owners=table.owners
        if exchange in ("row", "row_per_host") and table.dtype != "int8"
        else "block",
        hot=table.hot if may_be_hot else "none",
        once=table.once and table.sharding == "row_wise",
        # Position weights get gradients only through a trained table's lookup.
        frozen=table.frozen and not module.evicts and not module.trains_positions,
    )


def _drawn_module(rng: random.Random) -> ModuleCase:
    tables, next_feature = [], 0
    for _ in range(rng.choice(NUM_TABLES)):
        count = rng.choice((1, 1, 2))
        features = tuple(range(next_feature, next_feature + count))
        if next_feature and rng.random() < 0.15:
            features = (rng.randrange(next_feature), *features[1:])
        next_feature = max(next_feature, features[-1] + 1)
        tables.append(TableCase(features=features, **_chosen(rng, TABLE_CHOICES)))
    if rng.random() < ALIKE_SHARE:
        alike = {name: getattr(tables[0], name) for name in ALIKE}
        tables = [replace(table, **alike) for table in tables]
    module = ModuleCase(tables=tuple(tables), **_chosen(rng, MODULE_CHOICES))
    if module.kind == "positions":
        # No TorchRec module has both.
        return replace(module, evicts="")
    if module.kind != "sequences":
        return module
    # TorchRec's EmbeddingCollection has one dim.
    same = tuple(replace(table, dim=tables[0].dim) for table in tables)
    return replace(module, tables=same)


def _chosen(rng: random.Random, choices: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in choices.items()}

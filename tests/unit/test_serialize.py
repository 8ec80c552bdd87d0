"""Plan files: every plan survives a round trip, and anything else is a `PlanError`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torchrec.distributed.types import CacheParams, ShardingType as Stock

from tests.support.plans import plan_2d, plans, shard, sharding
from torchrec_2dsp import Mesh2D, Plan2D, pin
from torchrec_2dsp.errors import PlanError, UnsupportedError
from torchrec_2dsp.plan.fits_mesh import check_shards
from torchrec_2dsp.plan.serialize import from_json, load, save, to_json


def example() -> Plan2D:
    tables = {
        "t_row": sharding(Stock.ROW_WISE, [0, 1], 10),
        "t_data": sharding(Stock.DATA_PARALLEL, [0, 1], 10),
    }
    return pin(plan_2d(tables, Mesh2D(2, 2)), "t_row", hot_rows=[3, 12])


EXAMPLE = to_json(example())


@given(plans())
def test_round_trip(plan: Plan2D) -> None:
    text = to_json(plan)
    again = from_json(text)
    assert again == plan
    assert to_json(again) == text
    for _, module_plan in again.modules():
        assert module_plan.full_duplex == plan.full_duplex
        assert (module_plan.mesh, module_plan.sync) == (plan.mesh, plan.sync)


def test_the_exchange_and_the_owners_survive() -> None:
    plan = pin(example(), "t_row", exchange="row", owners="hash")
    assert from_json(to_json(plan)) == plan != pin(example(), "t_row", exchange="row")


def test_table_order_does_not_matter() -> None:
    plan = example()
    modules: dict[str, Any] = {
        path: module.with_tables(dict(reversed(list(module.items()))))
        for path, module in plan.modules()
    }
    assert to_json(replace(plan, plan=modules)) == EXAMPLE


@given(st.integers(0, len(EXAMPLE) - 1))
def test_truncated_text_is_refused(length: int) -> None:
    with pytest.raises(PlanError):
        from_json(EXAMPLE[:length])


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(0, len(EXAMPLE) - 1), st.integers(0, 6)), min_size=1))
def test_flipped_bits_give_a_valid_plan_or_a_plan_error(flips: list[tuple[int, int]]) -> None:
    text = list(EXAMPLE)
    for index, bit in flips:
        text[index] = chr(ord(text[index]) ^ (1 << bit))
    try:
        plan = from_json("".join(text))
    except PlanError:
        return
    plan.validate()
    assert from_json(to_json(plan)) == plan


@given(st.text() | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps))
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan file"):
        from_json(text)


REMOVED = object()
TABLE = "modules/ebc/t_row"
SHARD = f"{TABLE}/shards/0"


def edited(where: str, value: object) -> str:
    data = json.loads(EXAMPLE)
    *parents, key = where.split("/")
    parent = data
    for name in parents:
        parent = parent[int(name) if name.isdigit() else name]
    if value is REMOVED:
        del parent[key]
    else:
        parent[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("schema_version", REMOVED),
        ("modules", REMOVED),
        ("modules", []),
        ("modules", {}),
        ("modules/ebc", {}),
        ("modules/ebc", None),
        ("mesh/group_size", 0),
        ("mesh/layout", "diagonal"),
        ("sync/kind", "NoSync"),
        ("sync/unknown", 1),
        ("pipeline", "pigeon"),
        ("pipeline", None),
        ("full_duplex", 1),
        (f"{TABLE}/sharding_type", "2d_diagonal"),
        (f"{TABLE}/sharding_type", "row_wise"),
        (f"{TABLE}/sharding_type", 1),
        (f"{TABLE}/compute_kernel", REMOVED),
        (f"{TABLE}/ranks", ["a"]),
        (f"{TABLE}/ranks", 3),
        (f"{TABLE}/ranks", [9]),
        (f"{TABLE}/hot_rows", []),
        (f"{TABLE}/hot_rows", [3, 3]),
        (f"{TABLE}/hot_rows", ["3"]),
        (f"{TABLE}/hot_rows", [1.5]),
        (f"{TABLE}/hot_rows", list(range(1000))),
        (f"{TABLE}/exchange", "pigeon"),
        (f"{TABLE}/owners", "pigeon"),
        (f"{TABLE}/output_dtype", "FP1"),
        (f"{TABLE}/bounds_check_mode", 0),
        (f"{TABLE}/unknown", 1),
        ("unknown", 1),
        ("schema_version", True),
        ("schema_version", 1.0),
        ("mesh/num_groups", 10**30),
        ("mesh/num_groups", 2.0),
        ("mesh/group_size", True),
        ("sync/delay", True),
        ("sync/drift_every", 1.0),
        ("sync/drift_every", 10**39),
        (f"{TABLE}/ranks", None),
        (f"{TABLE}/ranks", []),
        (f"{TABLE}/ranks", [0, 0]),
        (f"{TABLE}/ranks", [1, 0]),
        (f"{TABLE}/compute_kernel", "x"),
        (f"{TABLE}/enforce_hbm", "x"),
        (f"{TABLE}/enforce_hbm", 1),
        (f"{TABLE}/num_groups", True),
        ("modules/ebc/t_data/ranks", [0]),
        ("modules/ebc/t_data/shards", []),
        (f"{SHARD}/shard_sizes", [20.5, 4]),
        (f"{SHARD}/shard_sizes", [True, 4]),
        (f"{SHARD}/shard_sizes", [10, 4, 1]),
        (f"{SHARD}/shard_sizes", [10**30, 4]),
        (f"{TABLE}/shards", []),
        (f"{TABLE}/shards", None),
        (f"{TABLE}/shards", "abc"),
        (f"{SHARD}/placement", "rank:x/cpu"),
        (f"{SHARD}/placement", "rank:0/bpu"),
        (f"{SHARD}/placement", "rank:9/cpu"),
        (f"{SHARD}/placement", None),
        (f"{SHARD}/shard_sizes", ["a", 4]),
        (f"{SHARD}/shard_sizes", []),
        (f"{SHARD}/shard_offsets", [-1, 0]),
        (f"{SHARD}/shard_offsets", REMOVED),
    ],
)
def test_wrong_values_are_refused(where: str, value: object) -> None:
    with pytest.raises(PlanError):
        from_json(edited(where, value))


ROW_WISE, WHOLE = "2d_row_wise", "2d_table_wise"


@pytest.mark.parametrize(
    ("kind", "shards", "message"),
    [
        (ROW_WISE, [(0, 0, 10, 4), (11, 0, 9, 4)], r"rows of columns 0..3 10..10 are in no shard"),
        (ROW_WISE, [(0, 0, 10, 4), (9, 0, 11, 4)], r"Shards .* overlap"),
        (ROW_WISE, [(0, 0, 10, 4), (0, 0, 10, 4)], r"Shards .* overlap"),
        (ROW_WISE, [(1, 0, 9, 4), (10, 0, 10, 4)], r"0..0 are in no shard"),
        (ROW_WISE, [(0, 0, 20, 2), (0, 2, 20, 2)], r"is row_wise, but a shard lacks columns"),
        (ROW_WISE, [(0, 0, 0, 4), (0, 0, 0, 4)], r"has 0 rows of 4 columns"),
        (ROW_WISE, [(0, 0, 20, 4)], r"row-wise with shards on ranks \[0\], but needs one on each"),
        (ROW_WISE, [(0, 0, 14, 4), (14, 0, 6, 4)], r"14 rows from row 0 on where .* looks 10 up"),
        (ROW_WISE, [(0, 0, 0, 4), (0, 0, 20, 4)], r"0 rows from row 0 on where .* looks 10 up"),
        (ROW_WISE, [(10, 0, 10, 4), (0, 0, 10, 4)], r"from row 10 on where .* from row 0 on"),
        (
            "2d_table_row_wise",
            [(0, 0, 12, 4), (12, 0, 8, 4)],
            r"is table_row_wise, and a shard has 1",
        ),
        (
            "2d_table_row_wise",
            [(0, 0, 7, 4), (7, 0, 7, 4), (14, 0, 6, 4)],
            r"on ranks \[0, 1, 0\], which don't follow one another",
        ),
        ("2d_grid_shard", [(0, 0, 9, 2), (9, 0, 11, 2), (0, 2, 20, 2)], r"9 rows from row 0 on"),
        ("2d_column_wise", [(0, 0, 20, 2), (0, 3, 20, 2)], r"columns 2..2 are in no shard"),
        ("2d_column_wise", [(0, 0, 10, 4), (10, 0, 10, 4)], r"column_wise, but a shard lacks rows"),
        (WHOLE, [(0, 0, 10, 4), (10, 0, 10, 4)], r"is table-wise and has 2 shards"),
        ("2d_grid_shard", [(0, 0, 10, 2), (0, 2, 10, 2), (10, 0, 10, 2)], r"columns 2..3 10..19"),
    ],
)
def test_shards_cover_their_table_once(
    kind: str, shards: list[tuple[int, int, int, int]], message: str
) -> None:
    data = json.loads(EXAMPLE)
    table = data["modules"]["ebc"]["t_row"]
    ranks = [index % 2 for index in range(len(shards))]
    table |= {"sharding_type": kind, "ranks": ranks, "hot_rows": None}
    table |= {"exchange": "pooled", "owners": "block"}
    table["shards"] = [
        {
            "shard_offsets": [row, column],
            "shard_sizes": [rows, columns],
            "placement": f"rank:{rank}/cpu",
        }
        for rank, (row, column, rows, columns) in zip(ranks, shards, strict=True)
    ]
    with pytest.raises(PlanError, match=message) as error:
        from_json(json.dumps(data))
    assert "ebc.t_row" in str(error.value)
    assert "plan the table again" in str(error.value)


def test_overlaps_that_torch_does_not_see_are_refused() -> None:
    overlapping = [shard(0, (0, 0), (10, 4)), shard(1, (9, 0), (11, 4))]
    with pytest.raises(PlanError, match=r"columns 0..3 9..9 are in more than one shard; plan the"):
        check_shards("t", Stock.ROW_WISE, overlapping, group_size=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited("schema_version", 2), "schema_version=2; this release reads 1"),
        (
            edited(f"{SHARD}/shard_sizes", [20.5, 4]),
            r"modules\.ebc\.t_row\.shards\.0\.shard_sizes\.0: .*integer",
        ),
        (
            edited("mesh/num_groups", 10**30),
            r"mesh\.num_groups: .* mend it there, or write plans with",
        ),
        (
            EXAMPLE.replace('"t_row"', '"t_data"'),
            "'t_data' is there twice in one object; remove one",
        ),
        (EXAMPLE.replace('"delay": 0', '"delay": NaN'), "NaN is no number of a plan"),
    ],
)
def test_messages_name_the_place_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        from_json(text)


def test_saved_files_have_a_checksum_and_others_need_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(example(), path)
    text = path.read_text()
    checksum = json.loads(text)["checksum"]
    assert checksum.startswith("sha256:")
    # How the file is laid out doesn't matter.
    path.write_text(json.dumps(json.loads(text)))
    assert load(str(path)) == example()
    path.write_text(text.replace("\n     3,\n", "\n     4,\n"))
    assert path.read_text() != text
    with pytest.raises(
        PlanError, match=r"plan\.json: .*checksum: .* remove the line if you edited"
    ):
        load(path)
    path.write_text(path.read_text().replace(f' "checksum": "{checksum}",\n', ""))
    assert load(path) == pin(example(), "t_row", hot_rows=[4, 12])


def test_files_without_later_keys_are_read_as_they_were_written() -> None:
    old = json.loads(EXAMPLE)
    del old["pipeline"], old["full_duplex"]
    for tables in old["modules"].values():
        for table in tables.values():
            del table["stored_as"]
    old["checksum"] = "sha256:7a60b9a36ed5736e89519af954fdb49997f7be523c7d2fcd85697e9e7b414ca6"
    assert from_json(json.dumps(old)) == example()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json can't be read: No such file"):
        load(tmp_path / "nowhere.json")


def test_files_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a plan file"):
        load(path)


def test_what_a_file_cannot_hold_is_refused() -> None:
    table = sharding(Stock.TABLE_WISE, [0], 10)
    table.cache_params = CacheParams(load_factor=0.2)
    with pytest.raises(UnsupportedError, match="table 't' has cache_params, which a plan file"):
        to_json(plan_2d({"t": table}, Mesh2D(2, 2)))

"""`access` counts a log as plain Python does, on any number of ranks, with equal errors."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.logs import (
    NUM_TAGS,
    NUM_USERS,
    hashed_row,
    make_rows,
    table_config,
    write_interactions,
    write_log,
)
from tests.support.programs import forked
from tests.support.ranks import RankPool, RanksFailed
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.access import AccessConfig, AccessResult, count_access
from torchrec_2dsp.programs.cli.access import show_access
from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.data.logs.sections import InteractionsConfig
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig

ROWS = make_rows(300)


def counted(config: AccessConfig) -> tuple[AccessResult, list[int]]:
    """Return this rank's counts, and its row count after each block."""
    num_rows: list[int] = []

    def progress(what: str, completed: int, total: int) -> None:
        if what == "counting rows":
            num_rows.append(completed)

    return count_access(config, world_group(), progress), num_rows


def checked_counts(rank: int, world_size: int, config: AccessConfig) -> None:
    """Compare with counts by plain Python."""
    result, num_rows = counted(config)
    users = Counter(hashed_row(row.user.encode(), NUM_USERS) for row in ROWS)
    tags = Counter(hashed_row(tag.encode(), NUM_TAGS) for row in ROWS for tag in row.tags)
    assert result.num_samples == len(ROWS)
    assert result.num_malformed == 0
    for table, counts in (("t_user", users), ("t_tags", tags)):
        access = result.stats[table]
        pairs = zip(access.rows.tolist(), access.counts.tolist(), strict=True)
        assert dict(pairs) == counts
        assert access.num_samples == len(ROWS)
    user_table, collision_rate = next(iter(result.collision_rates.items()))
    assert (user_table, result.stats[user_table].num_rows) == ("t_user", NUM_USERS)
    assert result.stats[user_table].num_used_rows == len(users)
    assert collision_rate is not None
    assert 0 < collision_rate < 0.2
    assert num_rows == sorted(num_rows)
    assert 0 < num_rows[-1] < len(ROWS)


def prepared_by_one_rank(rank: int, world_size: int, config: AccessConfig) -> int:
    """Return the vocabulary table's number of rows on this rank."""
    result, _ = counted(config)
    assert result.collision_rates["t_user"] is None
    return result.stats["t_user"].num_rows


def sequences_are_counted(rank: int, world_size: int, config: AccessConfig) -> float:
    result, _ = counted(config)
    return result.stats["t_item"].num_lookups


def malformed_are_counted(rank: int, world_size: int, config: AccessConfig) -> tuple[int, str]:
    result, _ = counted(config)
    console = Console(record=True, width=200)
    show_access(result, console)
    return result.num_malformed, console.export_text()


def malformed_part(rank: int, world_size: int, config: AccessConfig) -> str:
    """Count a log with one rank's part malformed; return the error."""
    with pytest.raises(InputError) as caught:
        count_access(config, world_group())
    return str(caught.value)


def differing_files(
    rank: int, world_size: int, configs: list[AccessConfig], are_hosts: bool = False
) -> str:
    """Return the error where each rank has another log, on one host or on separate hosts."""
    with pytest.MonkeyPatch.context() as patch:
        if are_hosts:
            patch.setenv("LOCAL_RANK", "0")
            patch.setenv("LOCAL_WORLD_SIZE", "1")
        with pytest.raises(ConfigError) as caught:
            count_access(configs[rank], world_group())
    return str(caught.value)


def test_ranks_count_together(ranks2: RankPool, tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.csv", ROWS)
    ranks2.run(checked_counts, AccessConfig(data=table_config(file, num_ahead=1)))
    features = [{"name": "user", "encoding": "vocabulary"}]
    keys = {"prepared": str(tmp_path / "prepared"), "features": features}
    sizes = ranks2.run(prepared_by_one_rank, AccessConfig(data=table_config(file, **keys)))
    assert sizes == [2 + len({row.user for row in ROWS if row.user})] * 2


def test_sequences(ranks2: RankPool, tmp_path: Path) -> None:
    log = [(f"u{user}", f"i{item}", item) for user in range(5) for item in range(4)]
    file = write_interactions(tmp_path / "a.inter", log)
    config = AccessConfig(data=InteractionsConfig(files=(str(file),)))
    # Each user's last item is held out.
    assert ranks2.run(sequences_are_counted, config) == [15.0, 15.0]
    # A sequence model looks up negatives as well.
    model = SequenceModelConfig(num_negatives=6)
    with_negatives = config.model_copy(update={"model": model})
    assert ranks2.run(sequences_are_counted, with_negatives) == [45.0, 45.0]


@pytest.mark.parametrize("by", ["last", "hash", "interactions"])
def test_a_malformed_line_counts_once(ranks2: RankPool, tmp_path: Path, by: str) -> None:
    if by == "interactions":
        log = [(f"u{user}", f"i{item}", item) for user in range(5) for item in range(4)]
        file = write_interactions(tmp_path / "a.inter", log)
        data = InteractionsConfig(files=(str(file),), malformed_limit=9)
    else:
        file = write_log(tmp_path / "a.csv", ROWS)
        held_out = {"by": by, "share": 0.1} | ({"column": "user"} if by == "hash" else {})
        features = [{"name": "user", "encoding": "vocabulary"}]
        keys = {"held_out": held_out, "features": features, "malformed_limit": 9, "block_bytes": 99}
        data = table_config(file, prepared=str(tmp_path / "prepared"), **keys)
    text = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*text[:4], "1\n", *text[4:13], "2\n", *text[13:]]))
    for num_malformed, shown in ranks2.run(malformed_are_counted, AccessConfig(data=data)):
        assert num_malformed == 2
        if by == "interactions":
            assert "Read 5 users of the log; 2 rows were malformed and replaced" in shown


def test_errors_are_those_of_all_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    good = write_log(tmp_path / "a.csv", ROWS[:5])
    text = "\n".join([good.read_text(), *["1,2"] * 3, ROWS[5].line])
    bad = tmp_path / "b.csv"
    bad.write_text(text)
    errors = ranks2.run(malformed_part, AccessConfig(data=table_config(bad, block_bytes=1000)))
    assert errors[0] == errors[1]
    assert f"{bad}:7: 2 values for 4 columns" in errors[0]
    other = table_config(good, features=[{"name": "user", "num_rows": 9}])
    configs = [AccessConfig(data=table_config(good)), AccessConfig(data=other)]
    first, second = ranks2.run(differing_files, configs)
    assert first == second
    assert "the log differs between ranks: rank 0 has user: 50 rows, rank 1 has user: 9" in first


def lines(names: str, *rows: str) -> str:
    return "\n".join([names, *rows]) + "\n"


CLICKS = "label,number,user,tags"
ANN = lines(CLICKS, *["1,2,ann,t"] * 3, "0,3,bob,")
BOB = lines(CLICKS, *["1,2,bob,t"] * 3, "0,3,ann,")
LONG = lines("user_id:token\titem_id:token\ttimestamp:float", *["u1\ti1\t1", "u1\ti2\t2"] * 5000)
TWO_HOSTS = {
    "rows": (ANN, ANN + "1,2,ann,t\n", "", r"file 1 \(log.csv\): 4 rows, 62 bytes that end"),
    "ends": (ANN, BOB, "", r"file 1 \(log.csv\): 4 rows, 62 bytes that end with digest"),
    "vocabulary": (ANN, ANN, BOB, "vocabulary of user: "),
    "scale": (ANN, ANN, ANN.replace("3", "9"), r"scale of number: mean 2.25, std "),
    "sequences": (LONG, LONG.replace("i1", "i9", 1), "", "sequences of users: "),
}
"""Each host's log, the log whose prepared files the second host kept, and the error."""


@pytest.mark.parametrize("case", TWO_HOSTS)
def test_hosts_with_other_files_are_told(ranks2: RankPool, tmp_path: Path, case: str) -> None:
    first, second, before, message = TWO_HOSTS[case]
    configs = []
    for host, text in (("host0", first), ("host1", second)):
        (tmp_path / host).mkdir()
        file = tmp_path / host / ("log.inter" if text[:4] == "user" else "log.csv")
        features = [{"name": "user", "encoding": "vocabulary"}]
        data = table_config(
            file, features=features, dense=[{"column": "number", "scale": "measured"}]
        )
        if host == "host1" and before:
            file.write_text(before)
            data.dataset()
        file.write_text(text)
        is_sequence = file.suffix == ".inter"
        section = InteractionsConfig(files=(str(file),), prepared=data.prepared)
        configs.append(AccessConfig(data=section if is_sequence else data))
    errors = ranks2.run(differing_files, configs, True)
    assert errors[0] == errors[1]
    pattern = f"the log differs between ranks: rank 0 has {message}.*rank 1 has .*; give all ranks"
    assert re.search(pattern, errors[0]), errors[0]


def test_drawn_data_is_no_log() -> None:
    with pytest.raises(ConfigError, match="so it is synthetic and has no files to count; give"):
        load_config(AccessConfig, "demo")


def test_the_command(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", ROWS)
    config = tmp_path / "config.toml"
    config.write_text(
        '[data]\nkind = "table"\nfiles = ["*.csv"]\nlabel = "label"\nheld_out = { share = 0 }\n'
        'features = [{ name = "user", num_rows = 50 }]\n[loop]\nsteps = 3\n'
    )
    output = tmp_path / "stats"
    process = forked(
        "torchrec_2dsp", "access", "--config", str(config), "--output", str(output), ranks=2
    )
    assert process.returncode == 0, process.stderr
    assert "Read 300 rows of the log; 0 were malformed" in process.stdout
    assert process.stdout.count("t_user") == 1
    stats = AccessStats.load(output)
    assert np.isclose(stats["t_user"].num_lookups, len(ROWS))
    process = forked(
        *("torchrec_2dsp", "access", "--config", str(config), "--output", str(output)),
        *("--set", "data.label=click"),
        ranks=2,
    )
    assert process.returncode == 2
    assert "has no column 'click'; it has 'label', 'number', 'user', 'tags'" in process.stderr


TABLE = EmbeddingBagConfig(100, 8, name="t", feature_names=["f"])


def gathered(rank: int, world_size: int, exact_rows: int) -> tuple[dict[int, float], float]:
    """Count and gather lookups of each rank's own row, and of row 50 on all ranks."""
    counter = tdsp.RowCounter([TABLE], exact_rows=exact_rows)
    for _ in range(rank + 1):
        counter.update(
            KeyedJaggedTensor(["f"], torch.tensor([rank, 50]), lengths=torch.tensor([1, 1]))
        )
    counter.gather()
    table = counter.gather()["t"]
    assert counter.stats()["t"].num_samples == 2 * (rank + 1), "gathering changes nothing"
    assert table.tail_lookups == table.tail_rows == 0
    return dict(zip(table.rows.tolist(), table.counts.tolist(), strict=True)), table.num_samples


@pytest.mark.parametrize("exact_rows", [100, 10])
def test_all_ranks_get_the_counts_of_all(ranks2: RankPool, exact_rows: int) -> None:
    expected = ({50: 3, 1: 2, 0: 1}, 6)
    assert ranks2.run(gathered, exact_rows) == [expected] * 2


def gather_what_differs(rank: int, world_size: int) -> None:
    tdsp.RowCounter([TABLE], exact_rows=10 if rank else 100).gather()


def test_ranks_that_count_differently_are_told(ranks2: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks2.run(gather_what_differs)
    message = "rank 0 has t: 100 rows, exactly, rank 1 has t: 100 rows, by a sketch of 65536"
    assert len(failed.value.reports) == 2
    assert all(message in report for report in failed.value.reports.values())

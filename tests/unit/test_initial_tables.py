"""Blocks of initial tables: how they are drawn, and that nothing else changes."""

from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import torchrec_2dsp as tdsp
from torchrec_2dsp.shard.initial_tables import BLOCK_ROWS, drawn_block

TABLE = EmbeddingBagConfig(num_embeddings=2_500, embedding_dim=4, name="t")


def test_blocks_are_cut_from_the_table_and_differ() -> None:
    blocks = [drawn_block(TABLE, 7, number) for number in range(3)]
    assert [len(block) for block in blocks] == [BLOCK_ROWS, BLOCK_ROWS, 2_500 - 2 * BLOCK_ROWS]
    values = torch.cat(blocks)
    assert len(values.unique()) > 9_900
    assert values.abs().max() <= 2_500**-0.5
    assert abs(values.mean().item()) < 1e-3


def test_seed_and_name_decide() -> None:
    known = drawn_block(TABLE, 7, 1)
    other = EmbeddingBagConfig(num_embeddings=2_500, embedding_dim=4, name="u")
    assert torch.equal(drawn_block(TABLE, 7, 1), known)
    assert not torch.equal(drawn_block(TABLE, 8, 1), known)
    assert not torch.equal(drawn_block(other, 7, 1), known)


def test_the_tables_own_way_to_start_is_kept() -> None:
    bounds: dict[str, Any] = {"weight_init_min": 2.0, "weight_init_max": 3.0}
    bounded = EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="t", **bounds)
    block = drawn_block(bounded, 0, 0)
    assert 2 <= block.min() < block.max() <= 3
    normal = EmbeddingBagConfig(
        num_embeddings=900, embedding_dim=4, name="t", init_fn=lambda table: table.normal_(5, 0.1)
    )
    assert drawn_block(normal, 0, 0).mean().item() == pytest.approx(5, abs=0.01)


@pytest.mark.parametrize("seed", [-1, True, 1.0, "0"])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(tdsp.errors.ConfigError, match="is no seed; use 0 or more"):
        tdsp.EmbeddingCollectionSharder2D(init_seed=seed)


def test_weights_are_kept_or_drawn() -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match="keep_weights=True and init_seed=0 contradict"
    ):
        tdsp.EmbeddingBagCollectionSharder2D(keep_weights=True, init_seed=0)

"""TorchRec's DLRM and its DCN, with a table for each feature of a dataset."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import BatchShape
from torchrec_2dsp.shard.initial_tables import draw_whole_tables_


def build_model(data: BatchShape, model: ModelConfig, *, tables_device: str = "cpu") -> DLRMTrain:
    """The unsharded model; equal configs give equal weights on every rank.

    Tables are drawn as sharders with ``init_seed=model.seed`` draw them.

    Args:
        data: the features, one table each.
        model: sizes and seed.
        tables_device: "meta" leaves the tables without weights, for models that no rank can hold.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=table_name(feature.name),
                    num_embeddings=feature.num_rows,
                    embedding_dim=model.dim,
                    feature_names=[feature.name],
                )
                for feature in data.features
            ],
            device=torch.device(tables_device),
        )
        if tables_device != "meta":
            draw_whole_tables_(tables, model.seed)
        # Not what the tables' weights left of the stream: their device must not matter.
        torch.manual_seed(model.seed + 1)
        sizes: dict[str, Any] = {
            "dense_in_features": data.num_dense,
            "dense_arch_layer_sizes": [*model.dense_layers, model.dim],
            "over_arch_layer_sizes": [*model.over_layers, 1],
        }
        if model.kind == "dlrm":
            return DLRMTrain(DLRM(tables, **sizes))
        cross_layers = DLRM_DCN(
            tables,
            **sizes,
            dcn_num_layers=model.dcn_layers,
            dcn_low_rank_dim=model.dcn_low_rank,
        )
        return DLRMTrain(cross_layers)


def table_name(feature: str) -> str:
    """The table of a feature."""
    return f"t_{feature}"


def rank_device(device: str) -> torch.device:
    """The device on which this rank computes."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, dist.get_node_local_rank(fallback_rank=0))

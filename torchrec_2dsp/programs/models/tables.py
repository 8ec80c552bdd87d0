"""`tables_of`: the tables of a model that isn't sharded."""

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_2dsp.shard.initial_tables import configs_of


def tables_of(model: nn.Module) -> list[BaseEmbeddingConfig]:
    """The configs of the tables of bags and sequences, in the model's order.

    Args:
        model: neither sharded nor quantised.
    """
    return [
        config
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
        for config in configs_of(module)
    ]

"""The sharders of who gives none."""

from typing import Any

from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp.shard.sequence_sharder import EmbeddingCollectionSharder2D
from torchrec_2dsp.shard.sharders import EmbeddingBagCollectionSharder2D


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """One sharder for each kind of module, each with TorchRec's defaults.

    TorchRec's function of this name has sharders for more kinds, which this package doesn't run.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> [sharder.module_type.__name__ for sharder in tdsp.get_default_sharders()]
        ['EmbeddingBagCollection', 'EmbeddingCollection']
    """
    return [EmbeddingBagCollectionSharder2D(), EmbeddingCollectionSharder2D()]

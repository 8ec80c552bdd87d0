"""`StockSequenceSharder`: TorchRec's sharder of sequences, where it works."""

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import ShardingType


class StockSequenceSharder(EmbeddingCollectionSharder):
    """TorchRec's sharder of sequences, without data-parallel tables on CPU.

    FBGEMM's dense lookup on CPU gives bags where sequences are asked for, and TorchRec's planner
    chooses it for small tables all the same.

    Example:
        >>> from torchrec_2dsp.programs.models.stock_sequences import StockSequenceSharder
        >>> "data_parallel" in StockSequenceSharder().sharding_types("cpu")
        False
        >>> "data_parallel" in StockSequenceSharder().sharding_types("cuda")
        True
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The types that work on a device."""
        kinds = super().sharding_types(compute_device_type)
        unusable = {ShardingType.DATA_PARALLEL.value} if compute_device_type == "cpu" else set()
        return [kind for kind in kinds if kind not in unusable]

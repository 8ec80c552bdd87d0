"""`StockSequenceSharder`: TorchRec's sharder of sequences, where it works."""

from torchrec.distributed.embedding import EmbeddingCollectionSharder

from torchrec_2dsp.shard.sequence_sharder import sequence_sharding_types


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
        return sequence_sharding_types(self, compute_device_type)

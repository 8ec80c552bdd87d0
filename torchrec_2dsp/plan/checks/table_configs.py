"""What an embedding table must be like to be planned and sharded at all."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torchrec.modules.embedding_configs import PoolingType

from torchrec_2dsp.errors import PlanError, UnsupportedError

_COLUMNS_AT_A_TIME = 4
"""FBGEMM's kernels work on so many columns."""


def check_tables(model: nn.Module) -> None:
    """Raise an error for the first table of ``model`` that `check_table_configs` refuses."""
    for path, module in model.named_modules():
        for method in ("embedding_bag_configs", "embedding_configs"):
            if hasattr(module, method):
                configs = getattr(module, method)()
                check_table_configs(path, configs, is_weighted=has_weights(module))


def has_weights(module: Any) -> bool:
    """Whether an embedding module looks ids up with weights; sequences have none."""
    return bool(getattr(module, "is_weighted", bool)())


def check_table_configs(path: str, configs: Iterable[Any], *, is_weighted: bool = False) -> None:
    """Raise an error for the first table that no kernel can hold, or that nobody can pool.

    Args:
        path: of the embedding module in the model.
        configs: of its tables, TorchRec's.
        is_weighted: whether ids have weights.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec_2dsp.plan.checks.table_configs import check_table_configs
        >>> table = EmbeddingBagConfig(
        ...     name="t", num_embeddings=9, embedding_dim=6, feature_names=["f"]
        ... )
        >>> check_table_configs("ebc", [table])
        Traceback (most recent call last):
            ...
        torchrec_2dsp.errors.PlanError: table 't' of module 'ebc' has embedding_dim=6; ...
    """
    for config in configs:
        if is_weighted and getattr(config, "pooling", None) is PoolingType.MEAN:
            raise UnsupportedError(
                f"table {config.name!r} averages weighted bags, which TorchRec's sharding types "
                "define differently, and its unsharded module not at all; use SUM pooling, and "
                "divide the weights where you need a mean"
            )
        where = f"table {config.name!r} of module {path!r}"
        if config.num_embeddings < 1:
            raise PlanError(f"{where} has {config.num_embeddings} rows; give it at least one")
        if config.embedding_dim < 1 or config.embedding_dim % _COLUMNS_AT_A_TIME:
            rounded = -(-max(config.embedding_dim, 1) // _COLUMNS_AT_A_TIME) * _COLUMNS_AT_A_TIME
            raise PlanError(
                f"{where} has embedding_dim={config.embedding_dim}; FBGEMM's kernels need a "
                f"multiple of {_COLUMNS_AT_A_TIME}, such as {rounded}"
            )


def table_text(config: Any) -> str:
    """All of a table's config that ranks would exchange or compute differently if it differed.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingConfig
        >>> from torchrec_2dsp.plan.checks.table_configs import table_text
        >>> table_text(
        ...     EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])
        ... )
        "9 x 8 FP32, a sequence of ['f']"
    """
    pooling = getattr(config, "pooling", None)
    return (
        f"{config.num_embeddings} x {config.embedding_dim} {config.data_type.value}, "
        f"{'a sequence' if pooling is None else pooling.value} of {config.feature_names}"
    )

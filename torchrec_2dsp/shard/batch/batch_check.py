"""`BatchCheck`: what can't be right about a batch stops all ranks before it trains anything."""

from collections.abc import Sequence
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.comms.alarm import Alarm, Check
from torchrec_2dsp.errors import InputError
from torchrec_2dsp.shard.bad_ids import BadIds, IdCheck
from torchrec_2dsp.shard.batch.batch_form import BatchForm


class BatchCheck:
    """Looks at the form of each batch, then at its ids."""

    def __init__(self, configs: Sequence[Any], policy: BadIds, alarm: Alarm) -> None:
        """
        Args:
            configs: the tables that the batches look up.
            policy: what to do with ids that no row has.
            alarm: of all ranks.
        """
        self.ids = IdCheck(configs, policy)
        """Finds ids that no row has."""
        features = [feature for config in configs for feature in config.feature_names]
        self._form = BatchForm(features, alarm.group)
        self._alarm = alarm

    def __call__(
        self, features: KeyedJaggedTensor, error: InputError | None = None
    ) -> tuple[KeyedJaggedTensor, Check]:
        """The batch as it is looked up, and what is to be waited for before that.

        Args:
            features: a batch, left as it is.
            error: what has been found wrong with it already.

        Collectives:
            That of `Alarm.check`; for the first batch that of `BatchForm.fit`.
        """
        features, error = self._form.fit(features, error)
        features, error = self.ids(features, error)
        return features, self._alarm.check(error)

"""The stages that see a batch first: one batch size for all features, and what can't be right.

What can't be right about a batch of one rank stops all ranks before it trains anything.
"""

from collections.abc import Sequence
from typing import Any

from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.comms.alarm import Alarm
from torchrec_2dsp.errors import InputError
from torchrec_2dsp.shard.bad_ids import BadIds, IdCheck
from torchrec_2dsp.shard.batch.batch_form import BatchForm
from torchrec_2dsp.shard.batch.notes import BatchNotes
from torchrec_2dsp.shard.batch.variable_batch_sizes import distinct_bags
from torchrec_2dsp.shard.stages import Output, Stage


def features_of(configs: Sequence[Any]) -> list[str]:
    """The features that look up tables, table by table."""
    return [feature for config in configs for feature in config.feature_names]


class OneBatchSize(Stage):
    """Makes batches whose features have batch sizes of their own ordinary batches of distinct bags,
    and gives each sample its bags at the output."""

    def __init__(self, configs: Sequence[Any], pack_size: int) -> None:
        """
        Args:
            configs: the tables that the batches look up.
            pack_size: how many numbers the codecs encode together; 1 if each by itself.
        """
        self._features = frozenset(features_of(configs))
        self._pack_size = pack_size

    def before_ids_travel(
        self, notes: BatchNotes, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """The distinct bags of a batch."""
        bags = distinct_bags(features, self._features)
        notes.bags_of_samples, notes.error = bags.of_samples, bags.error
        if self._pack_size > 1 and features.variable_stride_per_key():
            notes.error = notes.error or InputError(
                "a batch with a batch size for each feature has bags that don't fill packs of "
                f"{self._pack_size} numbers, in which the codecs (such as TorchRec's INT8) encode; "
                "leave them out and plan with transports=['int8']"
            )
        return bags.features

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """The bags, or the sequences, of each sample."""
        if notes.bags_of_samples is None:
            return output
        if isinstance(output, KeyedTensor):
            return notes.bags_of_samples.pooled(output)
        return notes.bags_of_samples.sequences(output)


class BatchCheck(Stage):
    """Looks at the form of each batch, then at its ids."""

    def __init__(
        self, configs: Sequence[Any], policy: BadIds, alarm: Alarm, is_weighted: bool
    ) -> None:
        """
        Args:
            configs: the tables that the batches look up.
            is_weighted: whether the tables take weights.
            policy: what to do with ids that no row has.
            alarm: of all ranks.
        """
        self.ids = IdCheck(configs, policy)
        """Finds ids that no row has."""
        self._form = BatchForm(features_of(configs), alarm.group, is_weighted=is_weighted)
        self._alarm = alarm

    def before_ids_travel(
        self, notes: BatchNotes, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """The batch as it is looked up.

        Collectives:
            That of `Alarm.check`, waited for before the lookup; for the first batch that of
            `BatchForm.fit`.
        """
        features, error = self._form.fit(features, notes.error)
        features, notes.error = self.ids(features, error)
        notes.check = self._alarm.check(notes.error)
        return features

    def before_lookup(self, notes: BatchNotes) -> None:
        """Raise, on all ranks, what is wrong with the batch of one of them."""
        if notes.check is not None:
            with record_function("## check ids ##"):
                notes.check.wait()

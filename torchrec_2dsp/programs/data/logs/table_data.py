"""`TableData`: a log of rows as a `Dataset`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.batches import BatchStream, EpochPlan, PartReader, check_batch
from torchrec_2dsp.programs.data.logs.blocks import ColumnKind
from torchrec_2dsp.programs.data.logs.config import HeldOut, TableLayout
from torchrec_2dsp.programs.data.logs.encoder import Encoder, LogFeature, Scale, columns_of
from torchrec_2dsp.programs.data.logs.files import list_files
from torchrec_2dsp.programs.data.logs.ids import Vocabulary
from torchrec_2dsp.programs.data.logs.malformed import MalformedLines
from torchrec_2dsp.programs.data.logs.prepared import Prepared, Progress
from torchrec_2dsp.programs.data.logs.row_index import RowIndex
from torchrec_2dsp.programs.data.logs.selection import (
    Selection,
    hashed_rows,
    last_rows,
    rows_of_files,
)
from torchrec_2dsp.programs.data.logs.sources import open_source

_NAMES = {Split.TRAIN: "training", Split.EVAL: "held-out"}


class TableData:
    """The rows of a log as batches."""

    def __init__(self, config: TableLayout, progress: Progress | None = None) -> None:
        """
        Args:
            config: the section of the config.
            progress: called while vocabularies and scales are made.
        """
        self._config = config
        self.malformed = MalformedLines(config.malformed_limit)
        """The lines that this process couldn't read."""
        columns = columns_of(config.label, config.dense, config.features)
        prepared = Prepared(config.prepared, config.dense, config.features)
        self._selections = _select(config, columns, self.malformed)
        with closing(self._selections[Split.TRAIN]) as trained:
            self._encoder = _encoder(config, *prepared.prepare(trained, columns, progress))

    @property
    def features(self) -> Sequence[LogFeature]:
        """The sparse features, in the order of the batch."""
        return self._encoder.features

    @property
    def num_dense(self) -> int:
        """How many dense features there are."""
        return len(self._config.dense)

    @property
    def held_out(self) -> HeldOut:
        """How rows were chosen that are held out."""
        return self._config.held_out

    def num_rows(self, split: Split) -> int:
        """How many rows a split has."""
        return self._selections[split].num_rows

    def num_batches(self, split: Split, global_batch_size: int) -> int:
        """How many batches an epoch of a split has."""
        return self._plan(split, global_batch_size).num_batches

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """How many global batches all epochs have; `None` if epochs never end."""
        if not self._config.epochs:
            return None
        return self._config.epochs * self.num_batches(Split.TRAIN, global_batch_size)

    def batches(
        self, split: Split, *, global_batch_size: int, rank: int, world_size: int, start: int = 0
    ) -> BatchStream:
        """This rank's part of the global batches of a split; see `Dataset.batches`.

        Batch n of an epoch is rows n*B to (n+1)*B of the split. Training batches end after the
        config's epochs, held-out ones after one. Held-out rows are never mixed.
        """
        check_batch(global_batch_size, rank, world_size, start)
        plan = self._plan(split, global_batch_size)
        plan.check(_NAMES[split])
        is_trained = split is Split.TRAIN

        def read(selection: Selection) -> Iterator[Batch]:
            reader = PartReader(
                selection=selection,
                encoder=self._encoder,
                plan=plan,
                rank=rank,
                world_size=world_size,
                epochs=self._config.epochs if is_trained else 1,
                shuffled_blocks=self._config.shuffled_blocks if is_trained else 0,
                seed=self._config.seed,
            )
            return reader.batches(start)

        return self._stream(split, read)

    def samples_once(self, split: Split, *, rank: int, world_size: int) -> BatchStream:
        """Every row of a split once, dealt to ranks by blocks, in batches of any size."""
        keys = [feature.name for feature in self.features]

        def read(selection: Selection) -> Iterator[Batch]:
            for piece in selection.pieces[rank::world_size]:
                table = selection.read(piece, self._encoder.columns)
                yield self._encoder.encode(table).batch(keys)

        return self._stream(split, read)

    def _stream(self, split: Split, read: Callable[[Selection], Iterator[Batch]]) -> BatchStream:
        def batches() -> Iterator[Batch]:
            # Files of its own: several streams may be read at the same time.
            selection = self._selections[split].fresh()
            try:
                yield from read(selection)
            finally:
                selection.close()

        return BatchStream(batches, num_ahead=self._config.num_ahead)

    def _plan(self, split: Split, global_batch_size: int) -> EpochPlan:
        return EpochPlan(self.num_rows(split), global_batch_size, self._config.rest)


def prepared_encoder(config: TableLayout) -> Encoder:
    """The encoder of a log whose rows needn't be there, but only what was prepared for it.

    Raises:
        ConfigError: a vocabulary or a scale is missing.
    """
    prepared = Prepared(config.prepared, config.dense, config.features)
    return _encoder(config, *prepared.read())


def _encoder(
    config: TableLayout, vocabularies: Mapping[str, Vocabulary], measured: Mapping[str, Scale]
) -> Encoder:
    given = {
        column.column: Scale(column.mean, column.std)
        for column in config.dense
        if column.scale == "given"
    }
    return Encoder(config.label, config.dense, config.features, vocabularies, {**measured, **given})


def _select(
    config: TableLayout, columns: dict[str, ColumnKind], malformed: MalformedLines
) -> dict[Split, Selection]:
    """The rows of each split."""
    files, held_out = list_files(config.files), list_files(config.held_out.files)
    both = sorted(set(files) & set(held_out))
    if both:
        raise ConfigError(
            f"{both[0]} is among files and among held_out.files; leave it out of one of them"
        )
    index = RowIndex(config.prepared)
    choice = config.held_out
    if choice.by == "hash" and choice.column not in columns:
        raise ConfigError(
            f"held_out.column={choice.column!r} is the column of no feature; name one of "
            f"{', '.join(feature.source for feature in config.features)}"
        )
    source = open_source(config.layout, [*files, *held_out], columns, malformed, index)
    if choice.by == "last":
        return last_rows(source, choice.share)
    if choice.by == "hash":
        return hashed_rows(source, columns, choice.column, choice.share, index)
    return {
        Split.TRAIN: rows_of_files(source, files),
        Split.EVAL: rows_of_files(source, held_out),
    }

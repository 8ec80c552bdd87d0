"""`TableData`: a log of rows as a dataset."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Progress, Split, check_batch
from torchrec_2dsp.programs.data.logs.batches import (
    BatchStream,
    EpochPlan,
    PartReader,
)
from torchrec_2dsp.programs.data.logs.config import HeldOut, TableLayout
from torchrec_2dsp.programs.data.logs.conversion import ConvertedFile
from torchrec_2dsp.programs.data.logs.encoder import (
    Encoder,
    LogFeature,
    Prepared,
    Scale,
    columns_of,
)
from torchrec_2dsp.programs.data.logs.files import list_files
from torchrec_2dsp.programs.data.logs.ids import Vocabulary
from torchrec_2dsp.programs.data.logs.source import (
    LogReader,
    LogSource,
    Selection,
    converted_files,
)
from torchrec_2dsp.programs.data.logs.text import Columns, MalformedLines

_NAMES = {Split.TRAIN: "training", Split.EVAL: "held-out"}


class TableData:
    """Serves a log's rows as batches."""

    def __init__(self, config: TableLayout, progress: Progress | None = None) -> None:
        """Open the log.

        Args:
            config: the config's section.
            progress: called during conversion, and while vocabularies and scales are built.
        """
        self._config = config
        self.malformed = MalformedLines(config.malformed_limit)
        """The malformed lines that this process read."""
        prepared = Prepared(config.prepared, config.dense, config.features)
        self._selections = _select(config, self.malformed, progress)
        trained = self._selections[Split.TRAIN]
        self._encoder = _encoder(config, *prepared.prepare(trained, progress))

    @property
    def features(self) -> Sequence[LogFeature]:
        """The sparse features, in batch order."""
        return self._encoder.features

    @property
    def num_dense(self) -> int:
        """The number of dense features."""
        return len(self._config.dense)

    @property
    def held_out(self) -> HeldOut:
        """The rule that selects held-out rows."""
        return self._config.held_out

    def num_rows(self, split: Split) -> int:
        """Return how many rows a split has."""
        return self._selections[split].num_rows

    def num_batches(self, split: Split, global_batch_size: int) -> int:
        """Return how many batches a split's epoch has."""
        return self._plan(split, global_batch_size).num_batches

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """Return how many global batches all epochs have; `None` if they never end."""
        if not self._config.epochs:
            return None
        return self._config.epochs * self.num_batches(Split.TRAIN, global_batch_size)

    def batches(
        self, split: Split, *, global_batch_size: int, rank: int, world_size: int, start: int = 0
    ) -> BatchStream:
        """Read this rank's part of a split's global batches; see `Dataset.batches`.

        An epoch's batch n is the split's rows n*B to (n+1)*B. Training batches end after the
        config's epochs, held-out ones after one. Held-out rows are never shuffled.
        """
        check_batch(global_batch_size, rank, world_size, start)
        plan = self._plan(split, global_batch_size)
        plan.check(_NAMES[split])
        selection, is_trained = self._selections[split], split is Split.TRAIN

        def read(reader: LogReader) -> Iterator[Batch]:
            part = PartReader(
                pieces=selection.pieces,
                reader=reader,
                encoder=self._encoder,
                plan=plan,
                rank=rank,
                world_size=world_size,
                epochs=self._config.epochs if is_trained else 1,
                shuffled_blocks=self._config.shuffled_blocks if is_trained else 0,
                seed=self._config.seed,
            )
            return part.batches(start)

        return self._stream(selection, read)

    def samples_once(self, split: Split, *, rank: int, world_size: int) -> BatchStream:
        """Read every row in a split once, dealt to ranks by blocks, in batches of any size."""
        keys = [feature.name for feature in self.features]
        selection = self._selections[split]

        def read(reader: LogReader) -> Iterator[Batch]:
            for piece in selection.pieces[rank::world_size]:
                yield self._encoder.encode(reader.read(piece)).batch(keys)

        return self._stream(selection, read)

    def _stream(
        self, selection: Selection, read: Callable[[LogReader], Iterator[Batch]]
    ) -> BatchStream:
        def batches() -> Iterator[Batch]:
            # Each stream has its own reader, since several may be read at the same time.
            with selection.reader() as reader:
                yield from read(reader)

        return BatchStream(batches, num_ahead=self._config.num_ahead)

    def _plan(self, split: Split, global_batch_size: int) -> EpochPlan:
        return EpochPlan(self.num_rows(split), global_batch_size, self._config.rest)


def prepared_encoder(config: TableLayout) -> Encoder:
    """Return a log's encoder from ``prepared`` alone; the log itself needn't exist.

    Raises:
        ConfigError: a vocabulary or a scale is missing.
    """
    prepared = Prepared(config.prepared, config.dense, config.features)
    return _encoder(config, *prepared.read())


def files_to_convert(config: TableLayout) -> list[ConvertedFile]:
    """List the log's files that need conversion."""
    files = [*list_files(config.files), *list_files(config.held_out.files)]
    return converted_files(config.layout, files, _columns(config), config.prepared)


def _columns(config: TableLayout) -> Columns:
    return columns_of(config.label, config.dense, config.features)


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
    config: TableLayout, malformed: MalformedLines, progress: Progress | None
) -> dict[Split, Selection]:
    """Select each split's rows."""
    columns, choice = _columns(config), config.held_out
    files, held_out = list_files(config.files), list_files(choice.files)
    both = sorted(set(files) & set(held_out))
    if both:
        raise ConfigError(
            f"{both[0]} is among files and among held_out.files; leave it out of one of them"
        )
    if choice.by == "hash" and choice.column not in columns:
        raise ConfigError(
            f"held_out.column={choice.column!r} is the column of no feature; name one of "
            f"{', '.join(feature.source for feature in config.features)}"
        )
    source = LogSource(
        config.layout,
        [*files, *held_out],
        columns,
        prepared=config.prepared,
        malformed=malformed,
        progress=progress,
    )
    if choice.by == "last":
        return source.last_rows(choice.share)
    if choice.by == "hash":
        return source.hashed_rows(choice.column, choice.share, config.prepared)
    return {
        Split.TRAIN: source.rows_of_files(files),
        Split.EVAL: source.rows_of_files(held_out),
    }

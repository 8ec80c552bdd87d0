"""`Stage`: one thing that a sharded module does beside TorchRec.

A sharded module has an ordered list of stages (`Tables2D.stages`). TorchRec distributes ids, looks
up and distributes rows; in between, each stage is called by the hooks that it overrides:

    before_ids_travel    in order     the batch, as it will be distributed
    before_lookup        in order     what has to be done before rows are read
    while_rows_travel    in order     what can be looked up here meanwhile
    on_output            backwards    the output of the module
    before_backward      in order

Tables are in one of two states, in which training or a reader of the state finds its rows:

    before_use           in order     rows are put where lookups and updates find them
    before_read          backwards    all updates are done, and rows are where state dicts show them
    after_write          in order     weights were written otherwise than by training
"""

from collections.abc import Mapping

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.shard.batch.notes import BatchNotes

Output = KeyedTensor | Mapping[str, JaggedTensor]
"""What a sharded module returns: a `KeyedTensor` of bags, or a `JaggedTensor` for each sequence."""


class Stage:
    """A stage that does nothing; subclasses override some of the hooks."""

    needs_keyed_jagged = False
    """Whether the stage can't do its work on batches that aren't a `KeyedJaggedTensor`."""

    def before_ids_travel(
        self, notes: BatchNotes, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """The batch as the next stage, and TorchRec after the last one, will see it.

        Args:
            notes: of the batch; the stage writes into its own fields.
            features: the batch, left as it is.
        """
        return features

    def before_lookup(self, notes: BatchNotes) -> None:
        """Do what has to be done before the rows of a batch are read."""

    def before_accumulating(self) -> None:
        """Do what needs a complete state, before backwards wait for others of their step."""

    def while_rows_travel(self, notes: BatchNotes) -> None:
        """Do what can be done on this rank while TorchRec's output exchange runs."""

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """The module's output, as the previous stage, or the user, will see it."""
        return output

    def before_backward(self, notes: BatchNotes) -> None:
        """Do what has to be done before the gradients of a batch reach any kernel."""

    def before_use(self) -> None:
        """Put rows where lookups and updates find them; the state may have been read or loaded."""

    def before_read(self) -> None:
        """Bring weights and optimizer state up to date, before they are read or written."""

    def after_write(self) -> None:
        """Take note that weights or optimizer state were written by hand, or from a checkpoint."""

"""`InteractionsLayout`: the keys of a log of interactions in a config."""

from pydantic import Field

from torchrec_2dsp.programs.config.config_file import PathsBesideConfig
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.data.logs.epochs import Rest


class InteractionsLayout(Section):
    """A log of interactions: who used which item when."""

    files: PathsBesideConfig = Field(min_length=1)
    """The files, in any order: paths and patterns."""

    user: str = "user_id:token"
    """The column of the users."""

    item: str = "item_id:token"
    """The column of the items."""

    time: str = "timestamp:float"
    """The column that orders the items of a user. Those of one time keep the order of the log."""

    feature: str = Field(default="item", min_length=1)
    """The name of the items' feature in the batch."""

    max_length: int = Field(default=50, ge=2)
    """How many of a user's last items a sample has; of a held-out sample, the item to predict is
    the last one."""

    min_items: int = Field(default=3, ge=3)
    """Users with fewer items are left out: one is held out, and of two more one is predicted."""

    is_shuffled: bool = True
    """Whether each epoch has the users in another random order; held-out users never have."""

    seed: int = Field(default=0, ge=0)
    """Another seed is another order."""

    epochs: int = Field(default=1, ge=0)
    """How often the users are read; 0 for endlessly. Held-out samples are read once."""

    rest: Rest = "drop"
    """What becomes of the last users of an epoch, if they don't fill a batch: they are dropped, or
    the batch is filled with users from the beginning of the epoch."""

    columns: tuple[str, ...] = ()
    """The names of all columns of text files; empty if the first line of each has them."""

    delimiter: str = Field(default="\t", min_length=1, max_length=1)
    """What stands between two values of a text file."""

    quote: str = Field(default="", max_length=1)
    """What stands around values of a text file; empty for nothing."""

    malformed_limit: int = Field(default=0, ge=0)
    """How many rows may lack a value, and how many lines may be unreadable."""

    num_ahead: int = Field(default=4, ge=0)
    """How many batches a thread makes ahead of time; 0 for none, and no thread."""

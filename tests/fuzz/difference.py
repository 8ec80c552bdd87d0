"""`Difference`: something that a rank saw and that isn't as expected."""


class Difference(Exception):
    """Ends the comparison of a case."""

    def __init__(self, kind: str, text: str) -> None:
        """
        Args:
            kind: of finding, in a few words without numbers.
            text: what differs, where and by how much.
        """
        self.kind, self.text = kind, text
        super().__init__(text)

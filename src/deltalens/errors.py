"""What deltalens raises: one line that says what was asked, what arrived and what to do."""


class DeltalensError(Exception):
    """The parent of every error that deltalens raises on purpose; its message is one printable line.

    Example:
        >>> import deltalens as dl
        >>> try:
        ...     dl.RunSpec.parse(neighbors=0)
        ... except dl.DeltalensError as error:
        ...     print(error)
        neighbors: input should be greater than or equal to 1, got 0
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class InputError(DeltalensError, ValueError):
    """An argument, a field of a spec or an array can't be used as it is."""


class ModelError(DeltalensError):
    """A model can't be loaded, or its structure can't be measured truthfully."""


class CorpusError(DeltalensError, ValueError):
    """A text can't be read, or is too small for what was asked."""


class StoreError(DeltalensError):
    """A run folder is damaged, belongs to another run, or can't be written."""


class ExecutorError(DeltalensError):
    """The workers of a run can't be reached, don't share its folder or its versions, or keep dying."""

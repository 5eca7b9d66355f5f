"""The one exception that reaches the user as a line."""


class SparseKVError(Exception):
    """A failure that the user can act on; its text is one line: found, expected, what to do.

    Only ``cli.py`` turns it into ``error: ...`` on stderr and exit code 1.
    """


class BusyError(SparseKVError):
    """The server does as much as it may do at once. The caller may ask again later."""


class LostModelError(SparseKVError):
    """The model's file is not what it was when it was opened: nothing more can be computed."""


class UnsupportedModelError(SparseKVError):
    """The file is in order, but this program cannot run such a model."""


class OptionError(SparseKVError):
    """An option does not go with another one, or with the machine."""

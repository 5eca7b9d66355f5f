"""The one exception that reaches the user as a line."""


class SparseKVError(Exception):
    """A failure that the user can act on; its text is one line: found, expected, what to do.

    Only ``cli.py`` turns it into ``error: ...`` on stderr and exit code 1.
    """


class BusyError(SparseKVError):
    """The server is busy. The caller may ask again later."""


class LacksMemoryError(SparseKVError):
    """The machine has no memory for this now. It may have some when other work is done."""


class LostModelError(SparseKVError):
    """The model's file has changed since it was opened. The model cannot go on."""


class UnsupportedModelError(SparseKVError):
    """The file is valid, but this program cannot run such a model."""


class NoRoomError(SparseKVError):
    """The GPU has too little free memory for a model."""


class OptionError(SparseKVError):
    """An option does not work with another option or with the machine."""

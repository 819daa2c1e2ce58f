"""The errors this package raises, by who can act on them.

A :class:`UserError` says in one line what was given, what is allowed and what to do; the command line prints that line
and exits with code 2. An :class:`OperatorError` names the rank, the operator, the peers and the shape; it ends the
process like any other exception.
"""

import importlib.util
import sys


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` in one line, or its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class FluxError(Exception):
    """Base of every error raised on purpose by megatron_flux."""


class UserError(FluxError):
    """Bad input: an argument, a file, a version or a layout. The message is a single line for the user."""


def require(package: str, needed_by: str) -> None:
    """Raise a UserError with the command that installs ``package`` if it is missing."""
    if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        raise UserError(f"{needed_by} needs {name}, which is not installed: pip install {name}")


class UnsupportedVersionError(UserError):
    """A torch or megatron-core outside the supported range, or one whose symbols are not the expected ones."""


class RendezvousError(FluxError):
    """The ranks of a run have not found each other; nothing has begun."""


class StorageError(FluxError):
    """A file that a run needs could not be written: a full disk, mostly. The message names the file and the cause."""


class FallbackError(FluxError):
    """``strict=True`` and a layer that flux would have to leave to stock Megatron."""


class OperatorError(FluxError):
    """A fused operator failed on this rank: the message names rank, operator, peers and shape."""


class SharedMemoryError(OperatorError, UserError):
    """Memory that the ranks of a group share could not be had. All of them raise it, and none keeps any of it."""


class InterruptedRunError(FluxError):
    """Somebody sent the launcher a signal; ``exit_code`` is what a shell expects then."""

    def __init__(self, message: str, signal_number: int) -> None:
        """``signal_number`` is the signal that ended the run."""
        super().__init__(message)
        self.exit_code = 128 + signal_number

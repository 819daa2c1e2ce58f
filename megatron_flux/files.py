"""Files that several processes read and write, on one node or several: whole ones, and a lock between writers.

Readers need no lock: a writer renames what it has finished.

Not filelock: where a file system has no ``flock`` (Lustre's default) it leaves a marker file instead, which a lost node
never removes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("megatron_flux")


def write_atomically(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Write ``content`` (text as UTF-8): a reader sees the old file or the whole new one, also after an OSError.

    Where it is ``synced`` that holds after a power cut too.
    """
    # In names that are no UTF-8 each strange byte becomes an escape, as JSON has it.
    # In the same folder: rename is atomic only within one file system.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
        if synced:
            sync(partial)
        os.replace(partial, path)
        if synced:
            sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that do so by themselves, or cannot
            raise
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[bool]:
    """Hold the lock file ``path``, made if missing. The lock ends with its process, and leaves the file.

    Yields False, with a warning, on a file system without locks. Raises TimeoutError: another process holds it after
    ``seconds``. Raises OSError: the file cannot be made.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # NFS makes a byte-range lock of it, which takes a file that is open for writing.
        file = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:
        file = os.open(path, os.O_RDONLY | flags)  # of another user: elsewhere that will do
    try:
        yield _acquired(file, path, time.monotonic() + seconds)
    finally:
        os.close(file)


def _acquired(file: int, path: Path, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # file servers answer either
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process holds {path}") from None
            time.sleep(0.1)
        except OSError as error:
            logger.warning("megatron_flux: %s cannot be locked (%s): going on without", path, error.strerror)
            return False

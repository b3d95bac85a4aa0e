"""A file mapped read-only, and whether it is still the file that was mapped. Knows no format.

The mapping lives as long as any view of it: `close` drops ours, and the last array that still looks into the file
keeps it readable, so nobody is left with a pointer to unmapped memory.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4.errors import ModelFormatError


class MappedFile:
    """A regular, non-empty file, mapped read-only. Raises ModelFormatError for anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = _open(path)
        # The descriptor stays open: it follows the file itself even if the name is given to another one.
        self._close = weakref.finalize(self, os.close, fd)
        self._fd = fd
        try:
            self._identity = self._look()
            self._map: mmap.mmap | None = mmap.mmap(fd, self._identity[0], access=mmap.ACCESS_READ)
        except BaseException:
            self._close()
            raise

    def _look(self) -> tuple[int, int]:
        """(size, modification time in ns), of a regular and non-empty file."""
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode):
            kind = "a directory" if stat.S_ISDIR(info.st_mode) else "not a regular file"
            raise ModelFormatError(f"a model is one GGUF file, but this is {kind}", file=str(self.path), where="path")
        if info.st_size == 0:
            raise ModelFormatError("the file is empty", file=str(self.path), where="byte 0")
        return info.st_size, info.st_mtime_ns

    @property
    def view(self) -> memoryview:
        """The whole file, read-only."""
        if self._map is None:
            raise ModelFormatError("the file was closed; open it again", file=str(self.path), where="path")
        return memoryview(self._map)

    def verify_unchanged(self) -> None:
        """Compare size and modification time with those at opening. One system call; raises ModelFormatError."""
        if not self._close.alive:
            raise ModelFormatError("the file was closed; open it again", file=str(self.path), where="path")
        before, now = self._identity, self._look()
        if now != before:
            raise ModelFormatError(
                "the file was changed after it was opened: results may be wrong. Close the model and open it again",
                file=str(self.path),
                where="size and modification time",
                expected=before,
                found=now,
            )

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """While active, a touched page is read alone: reading ahead, megabytes each time, is for whole tensors."""
        held = self._map
        if held is None:
            raise ModelFormatError("the file was closed; open it again", file=str(self.path), where="path")
        held.madvise(mmap.MADV_RANDOM)
        try:
            yield
        finally:
            held.madvise(mmap.MADV_NORMAL)

    def close(self) -> None:
        """Drop our hold of the file; may be called twice. Arrays that still look into it stay valid."""
        self._map = None
        self._close()


def _open(path: Path) -> int:
    try:
        # Non-blocking, or a named pipe would make us wait for a writer; it changes nothing for regular files.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ModelFormatError(f"cannot open the model file: {reason}", file=str(path), where="path") from exc

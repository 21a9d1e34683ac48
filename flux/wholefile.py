"""Replace a file in one step."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` by a file with this text, in one step that no crash and no power cut halves.

    The text is written to ``.<name>.<random>.tmp`` beside it. Only a process that is killed leaves
    that behind. A link of that name is not followed.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    # As mkstemp does it, which has no other mode than 0600: others may read what is under ``path``.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every file system lets a directory be opened
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

"""Replace a file atomically; set a damaged one aside."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` by a file with this text, atomically even on a crash or power cut.

    The text is written to ``.<name>.<random>.tmp`` in the same directory. That file stays behind
    only if the process is killed. A link of that name is not followed.

    Raises:
        OSError: the file cannot be written; ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    # Like mkstemp, but mkstemp has only mode 0600, and other users may need to read ``path``.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # also on Ctrl-C
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems do not allow opening a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def set_aside(path: Path) -> Path:
    """Rename a damaged file or directory to ``<name>.damaged-<n>``, of the first free n; return it.

    Raises:
        OSError: it cannot be renamed.
    """
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, target)
    return target


def write_output(path: Path, text: str) -> None:
    """Write a file that the user has named: whole, as ``write_whole``, and through links.

    Write into the existing file, without replacing it, if it is not regular, such as /dev/stdout,
    or if its directory is not writable. Escape characters that UTF-8 lacks, as in names of files.

    Raises:
        OSError: the file cannot be written; ``path`` is unchanged, if it is a regular file.
    """
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    target = Path(os.path.realpath(path))
    replaceable = target.is_file() and os.access(target.parent, os.W_OK)
    if path.exists() and not replaceable:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
    else:
        write_whole(target, text)

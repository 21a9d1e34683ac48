"""Keep the paths of multiprocessing's Unix sockets short enough."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import util

_MOST_BYTES = 107  # of the path of a Unix socket
_NAME = "/pymp-xxxxxxxx/listener-xxxxxxxx"


def use_short_socket_paths() -> None:
    """Let the fork server's socket be elsewhere if TMPDIR is too long a path for one.

    multiprocessing puts its sockets into a directory that it makes once, in ``tempfile.tempdir``,
    and then keeps. Only that directory is made elsewhere; other temporary files stay in TMPDIR.

    Raises:
        OSError: there is no other directory for temporary files.
    """
    chosen = tempfile.gettempdir()
    if len(os.fsencode(chosen)) + len(_NAME) <= _MOST_BYTES:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            try:
                util.get_temp_dir()
            finally:
                tempfile.tempdir = chosen
            return
    raise OSError(
        f"TMPDIR is {len(os.fsencode(chosen))} bytes long, too long for sockets "
        f"({_MOST_BYTES - len(_NAME)} at most), and no /tmp can be written"
    )

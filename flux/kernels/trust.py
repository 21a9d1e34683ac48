"""Decide whether a file may be loaded as code: whether another user can write or replace it.

A library runs with the rights of the process that loads it. Its manifest lies beside it, so a
correct hash says nothing about its author. The test is the write permission: to the file, to its
directory, and to any directory or link on the path to it.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import itertools
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_ACL = "system.posix_acl_access"
_MOST_LINKS = 40  # as in the kernel
_REMEDY = "make yourself its owner and only writer (chown, chmod go-w), or set FLUX_KERNEL_CACHE"

# Numbers of loads in this process, because a name must never be used for a second file.
_loads = itertools.count()


class UntrustedError(RuntimeError):
    """A file is not loaded because another user can write or replace it.

    The message has the path and the reason.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is refused: {reason}; {_REMEDY}")
        self.path = path
        self.reason = reason


def check(path: Path) -> None:
    """Raise UntrustedError if another user can write or replace ``path``."""
    reason = reason_untrusted(path)
    if reason is not None:
        raise UntrustedError(path, reason)


def reason_untrusted(path: Path, links: int = 0) -> str | None:
    """Return why another user can write or replace a directory or file; None if none can.

    The check covers every component of the path, links and their targets included. Inside flux's
    own package the check begins at the package: its parents hold flux's Python code too, which runs
    already. A path that does not exist is trusted as far as its parents are.

    Args:
        path: the file or directory.
        links: number of links followed so far.
    """
    path = path.absolute()
    inside = path.is_relative_to(_PACKAGE) and ".." not in path.parts
    trusted = _trusted(inside)
    current = _PACKAGE if inside else Path("/")
    rest = list(path.relative_to(current).parts)
    try:
        reason = _reason(os.stat(current), current, trusted, on_the_way=True)
        while rest and reason is None:
            name = rest.pop(0)
            if name == "..":
                current = current.parent  # not a link: links are replaced by their targets
                continue
            entry = current / name
            status = os.lstat(entry)
            if not stat.S_ISLNK(status.st_mode):
                current = entry
                reason = _reason(status, entry, trusted, on_the_way=True)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(entry))
            reason = _reason_owner(status, entry, trusted, on_the_way=True)
            target = Path(os.readlink(entry))
            if target.is_absolute() and reason is None:
                return reason_untrusted(target.joinpath(*rest), links)
            rest = [*target.parts, *rest]
        return reason or _reason(os.stat(current), current, trusted, on_the_way=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


@dataclass(frozen=True)
class _Trusted:
    """Users and groups that may write code to load, and whether all other users may."""

    users: frozenset[int]
    groups: frozenset[int] = frozenset()
    others: bool = False


def _trusted(inside: bool) -> _Trusted:
    """Return this user, root, and the owner of flux's code.

    Args:
        inside: whether the path is in the package; then all users that can write the package count
            too, because they can write that code.
    """
    users = frozenset({os.geteuid(), 0, *_code_owner(inside)})
    if not inside:
        return _Trusted(users)
    package = os.stat(_PACKAGE)
    groups = frozenset({package.st_gid} if package.st_mode & stat.S_IWGRP else ())
    return _Trusted(users, groups, bool(package.st_mode & stat.S_IWOTH))


def _reason(
    status: os.stat_result, path: Path, trusted: _Trusted, *, on_the_way: bool
) -> str | None:
    """Return why one directory or file is not trusted.

    Args:
        status: of the directory or file.
        path: for the message.
        trusted: users and groups that may write.
        on_the_way: whether it is a directory on the path to the file in question.
    """
    reason = _reason_owner(status, path, trusted, on_the_way=on_the_way)
    if reason is not None:
        return reason
    # In a sticky directory such as /tmp, other users can add entries but not replace ours.
    if on_the_way and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH and not trusted.others:
        return f"{path} is writable by every user"
    by_group = status.st_mode & stat.S_IWGRP and status.st_gid not in trusted.groups
    if by_group and not _is_private_group(status, path):
        return f"{path} is writable by the group {_group_name(status.st_gid)}"
    return None


def _reason_owner(
    status: os.stat_result, path: Path, trusted: _Trusted, *, on_the_way: bool
) -> str | None:
    owner = status.st_uid
    if owner in trusted.users or (on_the_way and owner == _unmapped_owner()):
        return None
    return f"{path} belongs to {_user_name(owner)}, not to {_user_name(os.geteuid())} or root"


def _code_owner(inside: bool) -> tuple[int, ...]:
    """Return the owner of flux's code, often an administrator; this process runs its code already.

    An id that stands for all unmapped users identifies none of them, so outside the package it does
    not count.
    """
    owner = os.stat(__file__).st_uid
    return () if owner == _unmapped_owner() and not inside else (owner,)


def _unmapped_owner() -> int | None:
    """Return the id that this user namespace shows for unmapped users; None in the first namespace.

    In a container without privileges, ``/`` and ``/home`` of the host have this owner.
    """
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        if mapped == ["0", "0", str(2**32 - 1)]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except OSError:  # no user namespaces, or no /proc
        return None


def _is_private_group(status: os.stat_result, path: Path) -> bool:
    """Return whether the group is private to the owner or this user, without other members.

    Distributions that give each user such a group set a umask of 0002, so caches and the folders
    above them are often writable by it; OpenSSH refuses these. The bits of the group may stand for
    an access control list that names other users, so a file with a list has no private group.
    """
    try:
        group = grp.getgrgid(status.st_gid)
        if _ACL in os.listxattr(path):
            return False
    except KeyError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS):
            raise
    for uid in (status.st_uid, os.geteuid()):
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            continue
        own = user.pw_gid == status.st_gid and user.pw_name == group.gr_name
        if own and set(group.gr_mem) <= {user.pw_name}:
            return True
    return False


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _group_name(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


class OpenFile:
    """A trusted open file: the file that is hashed, read and loaded is the same one.

    The path may lead to another file by then.

    Attributes:
        path: at which it was opened.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, most: int) -> bytes:
        """Return the contents.

        Raises:
            ValueError: the file has more than ``most`` bytes.
        """
        if self.size() > most:
            raise ValueError(f"{self.path.name} has more than {most} bytes")
        return b"".join(self._blocks())

    def sha256(self) -> str:
        """Return the hash, in hexadecimal."""
        hashed = hashlib.sha256()
        for block in self._blocks():
            hashed.update(block)
        return hashed.hexdigest()

    def _blocks(self) -> Iterator[bytes]:
        offset = 0
        while block := os.pread(self._descriptor, 1 << 20, offset):
            yield block
            offset += len(block)

    def name_to_load(self) -> str:
        """Return a path for dlopen that leads to this very file, and that no other load uses.

        dlopen takes a known path for the library of that path, even if the descriptor's number
        belongs to another file by now. So each load spells the path differently: the load's number
        in binary, as a slash or a dot after a slash. The descriptor need not stay open afterwards.
        A file that is loaded twice is one library, because dlopen then compares device and inode.
        """
        spelling = "".join("/." if bit == "1" else "//." for bit in f"{next(_loads):b}")
        return f"/proc/self/fd{spelling}/{self._descriptor}"


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Open a file that no other user can write or replace.

    Raises:
        UntrustedError: another user can.
        OSError: the file cannot be opened.
    """
    check(path)
    # Does not block on a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Checked again for the file that was opened, though only trusted users could have replaced
        # it.
        status = os.fstat(descriptor)
        trusted = _trusted(path.absolute().is_relative_to(_PACKAGE))
        reason = _reason(status, path, trusted, on_the_way=False)
        if reason is None and not stat.S_ISREG(status.st_mode):
            reason = "it is not a regular file"
        if reason is not None:
            raise UntrustedError(path, reason)
        yield OpenFile(path, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def verified(path: Path, sha256: str | None) -> Iterator[OpenFile]:
    """Open a library for loading.

    Args:
        path: of the library.
        sha256: of the library when its manifest was read; None: no comparison.

    Raises:
        UntrustedError: another user can write or replace the file.
        RuntimeError: the file has changed or cannot be opened.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(opened(path))
            actual = None if sha256 is None else file.sha256()
        except OSError as error:
            raise RuntimeError(f"cannot open {path}: {error.strerror}") from error
        if actual != sha256:
            raise RuntimeError(f"{path} has changed since its manifest was read: start again")
        yield file


def make_private(directory: Path) -> None:
    """Create a cache, and missing directories above it, for this user alone (mode 0700).

    Raises:
        OSError: it cannot be created.
    """
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def keep_others_out(directory: Path) -> None:
    """Remove write permission of group and others from a new directory, whatever the umask.

    Raises:
        OSError: the mode cannot be changed.
    """
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))

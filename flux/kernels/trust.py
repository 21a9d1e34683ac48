"""Decides whether a file may be loaded as code: whether another user can write or replace it.

A library runs with the rights of the process that loads it, and its manifest lies beside it, so a
correct hash says nothing about its author. What counts is who can write: to the file, to its
directory, and to any directory or link on the way to it.
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
_MOST_LINKS = 40  # as the kernel follows
_REMEDY = "make it yours alone (chown, chmod go-w), or name another directory in FLUX_KERNEL_CACHE"

# Numbers of loads in this process; a name must never be used for a second file.
_loads = itertools.count()


class UntrustedError(RuntimeError):
    """A file is not loaded because another user can write or replace it; the message has the path
    and the reason."""

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
    """Say why another user can write or replace ``path``, a directory or a file; None if none can.

    Everything on the way is looked at, links and their targets included. Inside flux's own package
    the way begins at the package: its parents hold flux's Python code too, which runs already. A
    path that does not exist is trusted as far as its parents are. ``links`` were followed before.
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
                current = current.parent  # no link: those are replaced by their targets
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
    """Users, groups, and whether all others, that may write what is loaded."""

    users: frozenset[int]
    groups: frozenset[int] = frozenset()
    others: bool = False


def _trusted(inside: bool) -> _Trusted:
    """This user and root, and the owner of flux's code; ``inside`` the package all that can write
    the package, too, and so can write that code."""
    users = frozenset({os.geteuid(), 0, *_code_owner(inside)})
    if not inside:
        return _Trusted(users)
    package = os.stat(_PACKAGE)
    groups = frozenset({package.st_gid} if package.st_mode & stat.S_IWGRP else ())
    return _Trusted(users, groups, bool(package.st_mode & stat.S_IWOTH))


def _reason(
    status: os.stat_result, path: Path, trusted: _Trusted, *, on_the_way: bool
) -> str | None:
    """Of one directory or file. ``on_the_way``: a directory that leads to what is asked about."""
    reason = _reason_owner(status, path, trusted, on_the_way=on_the_way)
    if reason is not None:
        return reason
    # In a sticky directory, as /tmp, other users can add entries but not replace ours.
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
    """The owner of flux's code, often an administrator: this process runs that user's code already.

    An id that stands for all unmapped users identifies none of them, so outside the package it
    does not count.
    """
    owner = os.stat(__file__).st_uid
    return () if owner == _unmapped_owner() and not inside else (owner,)


def _unmapped_owner() -> int | None:
    """The id that this user namespace shows for users that it does not map; None in the first one.

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
    """Whether the group is the owner's or this user's own, without other members.

    Distributions that give each user such a group set a umask of 0002. An access control list can
    hide behind the bits of the group, so a file with one has no private group.
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
    """A trusted file, open: what is hashed, read and loaded is the same file, whatever is at its
    path by then.

    Attributes:
        path: that it was opened at.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self) -> bytes:
        """All of it."""
        return b"".join(self._blocks())

    def sha256(self) -> str:
        """In hexadecimal."""
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
        """Return a path for dlopen that leads to this very file, and that no other load has.

        dlopen takes a name that it knows for the library of that name, even if the number is by now
        that of another file. So each load spells the path in its own way: its number in binary, a
        slash or a dot after a slash. The descriptor need not stay open afterwards, and a file that
        is loaded twice is one library, since dlopen then compares device and inode.
        """
        spelling = "".join("/." if bit == "1" else "//." for bit in f"{next(_loads):b}")
        return f"/proc/self/fd{spelling}/{self._descriptor}"


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Open a file that no other user can write or replace.

    Raises:
        UntrustedError: another user can.
        OSError: it cannot be opened.
    """
    check(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Once more for what was really opened, though only trusted users could have replaced it.
        status = os.fstat(descriptor)
        trusted = _trusted(path.absolute().is_relative_to(_PACKAGE))
        reason = _reason(status, path, trusted, on_the_way=False)
        if reason is None and not stat.S_ISREG(status.st_mode):
            reason = "it is no regular file"
        if reason is not None:
            raise UntrustedError(path, reason)
        yield OpenFile(path, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def verified(path: Path, sha256: str | None) -> Iterator[OpenFile]:
    """Open a library for loading; ``sha256``: of the library that its manifest was read with.

    Raises:
        UntrustedError: another user can write or replace it.
        RuntimeError: it is another file by now, or cannot be opened.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(opened(path))
            found = None if sha256 is None else file.sha256()
        except OSError as error:
            raise RuntimeError(f"cannot open {path}: {error.strerror}") from error
        if found != sha256:
            raise RuntimeError(f"{path} has changed since its manifest was read: start again")
        yield file


def make_private(directory: Path) -> None:
    """Create a cache, and what is missing above it, for this user alone (mode 0700).

    Raises:
        OSError: it cannot be created.
    """
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def keep_others_out(directory: Path) -> None:
    """Take the right to write from group and others, whatever the umask; of a new directory.

    Raises:
        OSError: the mode cannot be changed.
    """
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))

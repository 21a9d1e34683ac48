"""Files that are replaced in one step: no link is followed, and nothing is left."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from flux.core.datafile import write_whole
from flux.kernels import build
from flux.kernels.children import Children
from flux.select.cache import Cache


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_file_is_replaced_with_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "winners.json"
    for text in ("first", "second"):
        write_whole(path, text)
        assert path.read_text() == text and path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_when_it_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a directory"
    path.mkdir()
    with pytest.raises(OSError):
        write_whole(path, "text")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "new", "\ud800")
    assert list(tmp_path.iterdir()) == [path]


def test_planted_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("untouched")
    folder.mkdir()
    for name in (".out.tmp", f".out.{os.getpid()}.tmp"):  # of the target and this process
        (folder / name).symlink_to(victim)
    write_whole(folder / "out", "text")
    assert (folder / "out").read_text() == "text" and victim.read_text() == "untouched"
    monkeypatch.setattr(secrets, "token_hex", lambda length: "guessed")
    (folder / ".out.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(folder / "out", "other")
    assert (folder / "out").read_text() == "text" and victim.read_text() == "untouched"


def test_the_cache_probes_no_planted_link(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.directory.mkdir(parents=True)
    victim = tmp_path / "victim"
    (cache.directory / f".probe.{os.getpid()}.tmp").symlink_to(victim)
    cache.check_writable()
    assert not victim.exists()


def test_builds_follow_no_planted_link(tmp_path: Path) -> None:
    victim, root = tmp_path / "victim", tmp_path / "root"
    for folder in (victim, root):
        folder.mkdir()
    (victim / "kept").write_text("untouched")
    log = build.failure_log(root, "library")
    log.symlink_to(victim / "kept")
    (root / ".building-library").symlink_to(victim)

    def make(staging: Path) -> None:
        (staging / "made").write_text("here")
        with pytest.raises(build.CompileError):
            build.run_all([["false"]], staging, Children(), "a kernel", log)

    _, fresh = build.in_place(root, "library", Path.exists, make, Children())
    assert fresh and (root / "library" / "made").is_file()
    assert [path.name for path in victim.iterdir()] == ["kept"]
    assert (victim / "kept").read_text() == "untouched" and log.read_text().startswith("false\n")

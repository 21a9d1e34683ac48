"""Which kernel libraries are loaded: only files that no other user can write or replace.

Another user is a second uid for root; for others, root's files seem to be another user's, or this
process seems to run as another one.
"""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flux import _C
from flux.doctor import examine as doctor
from flux.kernels import driver, loading, manifest, runtime, trust
from flux.kernels.manifest import Library
from flux.kernels.ptxas import Usage
from flux.kernels.registry import BuiltKernel, Registry
from flux.kernels.sets import config_set
from flux.kernels.trust import UntrustedError
from flux.transport.nvshmem_library import NvshmemLibrary
from kernel_sandbox import ROOT, Sandbox

SM90 = config_set("minimal", ["90a"])
STRANGER = 54321

_PLANTED = """
#include "cuda/abi.h"
#include <cstdlib>
static void __attribute__((constructor)) planted() { ::setenv("FLUX_TEST_PLANTED", NAME, 1); }
extern "C" __attribute__((visibility("default"))) const FluxKernel flux_planted = {
    FLUX_ABI_VERSION, sizeof(FluxGemmArgs), NAME, 64, 64, nullptr, nullptr, nullptr, nullptr,
    nullptr, nullptr, nullptr};
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that is trusted, whatever the umask."""
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o755)
    return folder


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make ``give_away`` possible without root."""
    if os.geteuid() != 0:
        monkeypatch.setattr(trust, "_code_owner", lambda inside: ())
    yield


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``path`` belong to another user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    else:  # then everything of this user's is another user's
        monkeypatch.setattr(trust.os, "geteuid", lambda: STRANGER)


def build_set(sandbox: Sandbox) -> list[Library]:
    plan = driver.plan(SM90, sandbox.cache, sandbox.tools())
    driver.build_all(plan.units, sandbox.cache, sandbox.tools(), 2, driver.CompileObserver())
    return list(manifest.scan(sandbox.cache))


def planted(folder: Path, name: str) -> Path:
    """A library with a kernel ``flux_planted`` that says ``name``; loading it leaves a trace."""
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(_PLANTED.replace("NAME", f'"{name}"'))
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "no C++ compiler"
    options = ["-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    library.chmod(0o755)
    return library


def in_environment() -> str | None:
    """Return the variable that a planted library sets; os.environ does not show it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = getenv(b"FLUX_TEST_PLANTED")
    ctypes.CDLL(None).unsetenv(b"FLUX_TEST_PLANTED")
    return None if found is None else found.decode()


def kernel_of(library: Path, sha256: str | None = None) -> BuiltKernel:
    return BuiltKernel(SM90[0], library, "flux_planted", Usage(), sha256)


# -- which are refused -----------------------------------------------------------------------------


def parts(library: Library) -> dict[str, Path]:
    return {
        "root": library.directory.parent,
        "directory": library.directory,
        "library": library.path,
        "manifest": library.directory / f"{library.name}.json",
    }


@pytest.mark.parametrize("part", ["root", "directory", "library", "manifest"])
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_world_writable_libraries_are_not_used(sandbox: Sandbox, part: str, mode: int) -> None:
    libraries = build_set(sandbox)
    path = parts(libraries[0])[part]
    path.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"{path} is writable by every user"):
        registry = Registry.load([sandbox.cache])
    gone = {library.name for library in (libraries if part == "root" else libraries[:1])}
    assert {library.name for library in registry.libraries} == {
        library.name for library in libraries if library.name not in gone
    }
    assert registry.refused == ((path, f"{path} is writable by every user"),)
    assert path.exists() and manifest.damaged(sandbox.cache) == []  # nothing is moved either


@pytest.mark.parametrize("part", ["root", "directory", "library", "manifest"])
@pytest.mark.usefixtures("stranger")
def test_libraries_of_another_user_are_not_used(
    sandbox: Sandbox, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_set(sandbox)[0]
    give_away(parts(library)[part], monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"is refused: .* belongs to .*uid"):
        registry = Registry.load([sandbox.cache])
    assert library.name not in {one.name for one in registry.libraries}
    assert registry.refused


def test_a_library_with_a_group_that_has_other_members_is_not_used(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_set(sandbox)[0]
    library.path.chmod(0o664)
    gid = library.path.stat().st_gid

    def group(members: list[str], name: str = "me") -> None:
        made = grp.struct_group((name, "x", gid, members))
        monkeypatch.setattr(trust.grp, "getgrgid", lambda _: made)

    account = pwd.struct_passwd(("me", "x", os.geteuid(), gid, "", "/", "/bin/sh"))
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda _: account)
    group([])
    assert trust.reason_untrusted(library.path) is None  # the user's private group
    group(["me"])
    assert trust.reason_untrusted(library.path) is None
    group(["me", "mallory"])
    assert "is writable by the group" in (trust.reason_untrusted(library.path) or "")
    group([], name="users")
    assert "is writable by the group users" in (trust.reason_untrusted(library.path) or "")
    group([])
    monkeypatch.setattr(trust.os, "listxattr", lambda _: ["system.posix_acl_access"])
    assert "is writable by the group" in (trust.reason_untrusted(library.path) or "")


def test_parent_directories_are_checked(folder: Path) -> None:
    root = folder / "a/b"
    root.mkdir(parents=True, mode=0o755)
    assert trust.reason_untrusted(root) is None
    (folder / "a").chmod(0o777)
    assert trust.reason_untrusted(root) == f"{folder / 'a'} is writable by every user"
    (folder / "a").chmod(0o1777)  # as /tmp: nobody else can rename b
    assert trust.reason_untrusted(root) is None
    assert trust.reason_untrusted(folder / "a") == f"{folder / 'a'} is writable by every user"


@pytest.mark.usefixtures("stranger")
def test_links_and_their_targets_are_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "open/root").mkdir(mode=0o755)
    (folder / "link").symlink_to(folder / "open")
    (folder / "relative").symlink_to("open/../open")
    (folder / "loop").symlink_to("loop")
    for path in (folder / "link/root", folder / "relative/root", folder / "link"):
        assert trust.reason_untrusted(path) == f"{folder / 'open'} is writable by every user"
    (folder / "open").chmod(0o755)
    assert trust.reason_untrusted(folder / "relative/root") is None
    assert "symbolic links" in (trust.reason_untrusted(folder / "loop/root") or "")
    give_away(folder / "link", monkeypatch)
    assert "belongs to" in (trust.reason_untrusted(folder / "link/root") or "")


def test_the_owner_of_fluxs_code_is_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_code_owner", lambda inside: (STRANGER,))
    if os.geteuid() == 0:
        os.chown(folder, STRANGER, STRANGER)
    assert trust.reason_untrusted(folder) is None


def test_inside_the_package_only_its_own_directories_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder / "site-packages/flux"
    (package / "lib/kernels").mkdir(parents=True, mode=0o755)
    package.parent.chmod(0o777)
    assert "site-packages is writable" in (trust.reason_untrusted(package / "lib/kernels") or "")
    monkeypatch.setattr(trust, "_PACKAGE", package)
    assert trust.reason_untrusted(package / "lib/kernels") is None
    (package / "lib").chmod(0o777)
    assert trust.reason_untrusted(package / "lib/kernels") is not None
    package.chmod(0o777)  # its Python code can be replaced as well
    assert trust.reason_untrusted(package / "lib/kernels") is None


def test_containers_show_one_owner_for_users_that_they_do_not_map(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a second user")
    (folder / "home").mkdir(mode=0o755)
    os.chown(folder, STRANGER, STRANGER)
    assert trust.reason_untrusted(folder / "home") is not None
    monkeypatch.setattr(trust, "_unmapped_owner", lambda: STRANGER)
    assert trust.reason_untrusted(folder / "home") is None  # on the way, as / and /home
    assert trust.reason_untrusted(folder) is not None


# -- what is built ---------------------------------------------------------------------------------


def test_caches_are_made_for_their_user_alone(sandbox: Sandbox) -> None:
    before = os.umask(0)
    try:
        done = sandbox.compile("--set", "minimal", "--arch", "90a")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert sandbox.cache.stat().st_mode & 0o777 == 0o700
    for path in sandbox.cache.glob("libflux_*/**/*"):
        assert path.stat().st_mode & 0o022 == 0, path
    assert Registry.load([sandbox.cache]).refused == ()


def test_nothing_is_built_where_it_would_not_be_used(sandbox: Sandbox) -> None:
    sandbox.cache.mkdir()
    sandbox.cache.chmod(0o777)
    done = sandbox.compile("--set", "minimal", "--arch", "90a")
    assert done.returncode == 2
    assert "is writable by every user" in " ".join(done.stderr.split())
    assert sandbox.calls() == []
    [unit, *_] = driver.plan(SM90, sandbox.root / "elsewhere", sandbox.tools()).units
    [outcome] = driver.build_all(
        [unit], sandbox.cache, sandbox.tools(), 1, driver.CompileObserver()
    )
    assert "is writable by every user" in outcome.error


def test_doctor_says_which_directory_is_refused_and_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = folder / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("FLUX_KERNEL_CACHE", str(cache))
    with pytest.warns(RuntimeWarning, match="is refused"):
        items = doctor._kernels()
    [refused] = [item for item in items if item.name == "refused"]
    assert (refused.value, refused.status) == (str(cache), "warning")
    assert f"{cache} is writable by every user" in refused.note


# -- what is loaded --------------------------------------------------------------------------------


def test_a_planted_library_does_not_run(folder: Path) -> None:
    library = planted(folder, "mallory")
    library.chmod(0o777)
    with pytest.raises(UntrustedError, match=r"mallory\.so is writable by every user"):
        loading.load(kernel_of(library))
    with pytest.raises(RuntimeError, match=r"mallory\.so is writable by every user"):
        NvshmemLibrary(library, None)
    assert in_environment() is None
    library.chmod(0o755)
    assert loading.load(kernel_of(library)).name == "mallory"
    assert in_environment() == "mallory"


def test_a_library_of_several_nodes_is_not_used_from_an_open_directory(folder: Path) -> None:
    directory = folder / "nvshmem_0123"
    directory.mkdir()
    (directory / f"{runtime.NAME}.json").write_text("{}")
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="is writable by every user"):
        assert runtime.scan(folder) == []
    folder.chmod(0o755)
    directory.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="is writable by every user"):
        assert runtime.scan(folder) == []
    assert manifest.refused(folder) == [(directory, f"{directory} is writable by every user")]


def test_a_file_that_differs_from_the_manifest_is_not_loaded(folder: Path) -> None:
    library = planted(folder, "first")
    sha256 = manifest.file_hash(library)
    os.replace(planted(folder, "second"), library)
    with pytest.raises(RuntimeError, match=r"first\.so has changed since its manifest was read"):
        loading.load(kernel_of(library, sha256))
    with pytest.raises(RuntimeError, match="has changed since its manifest was read"):
        NvshmemLibrary(library, None, sha256)
    assert in_environment() is None


def test_the_hashed_file_is_the_loaded_one(folder: Path) -> None:
    library, other = planted(folder, "hashed"), planted(folder, "swapped")
    with trust.verified(library, manifest.file_hash(library)) as file:
        os.replace(other, library)  # after the hash, before the load
        kernel = _C.Kernel(str(library), "flux_planted", file.name_to_load())
    assert kernel.name == in_environment() == "hashed"


def test_libraries_that_are_opened_under_one_number_are_not_mixed_up(folder: Path) -> None:
    one, two = planted(folder, "one"), planted(folder, "two")
    # Each load has the number that the last one has closed, and dlopen goes by names first.
    held = loading.load(kernel_of(one))
    for _ in range(3):
        assert loading.load(kernel_of(two)).name == "two"
        assert loading.load(kernel_of(one)).name == "one"
    in_environment()
    again = loading.load(kernel_of(one))
    assert in_environment() is None  # one library, loaded once
    assert held.name == "one"
    del held
    assert again.name == "one"
    del again
    # It stays: unloading would wait for the device, whose kernels may wait for the next call.
    assert loading.load(kernel_of(one)).name == "one"
    assert in_environment() is None


def test_messages_name_the_library_and_not_the_descriptor(folder: Path) -> None:
    library = folder / "broken.so"
    library.write_text("no library")
    library.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"^cannot open .*broken\.so: .*broken\.so: ") as error:
        loading.load(kernel_of(library))
    assert "/proc" not in str(error.value)
    with pytest.raises(RuntimeError, match=r"broken\.so cannot be loaded: ") as error:
        NvshmemLibrary(library, None)
    assert "/proc" not in str(error.value)
    with pytest.raises(RuntimeError, match=r"cannot open .*nowhere\.so: No such file"):
        loading.load(kernel_of(folder / "nowhere.so"))

"""Distribution of tests to several pytest workers (pytest -n, as in make test).

A worker takes whole files, for the sake of what their tests share. At the end, when all files are
taken, workers that have nothing to do help with the fullest one.

Tests with the marker ``alone`` come last: one worker runs them, when all others have ended.

What several workers need and takes long to build, they build once: ``built_once``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


def common_folder(config: pytest.Config) -> Path:
    """The temporary folder of this run, which all its workers see; pytest removes it some runs on.

    Each worker's own folder is in it.
    """
    own: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return own.parent if hasattr(config, "workerinput") else own


def built_once(config: pytest.Config, name: str, build: Callable[[Path], Path]) -> Path:
    """What ``build`` makes in a folder and returns the path of; it is called once in a run.

    A build that fails is tried again by the next who asks.
    """
    folder = common_folder(config) / f"built-{name}"
    folder.mkdir(exist_ok=True)
    result_file = folder / "built"
    with FileLock(folder / "lock", timeout=600):
        if not result_file.exists():
            made = build(Path(tempfile.mkdtemp(dir=folder)))
            result_file.write_text(str(made))
        return Path(result_file.read_text())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: there is none in what thousands of tests import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each worker of a run begin with another part of a folder.

    In a fresh checkout, half of a collection's time goes into rewriting the assertions of test
    files. What one worker has rewritten, the others load.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and isinstance(collector, pytest.Dir):
        number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        first = len(report.result) * (number % count) // count
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort files: all workers need the same order.

    Backwards: the tests of tuning wait most, so they begin first, and the many short ones of the
    PTX machine end a run, when workers would wait for a long one.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path, reverse=True)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist then tells that this worker has its tests
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write which tests are to run alone: what shares them out hears nothing but their names.

    What is imported by then is left out of garbage collections.
    """
    gc.freeze()
    if not hasattr(session.config, "workerinput"):
        return
    alone = [index for index, item in enumerate(session.items) if item.get_closest_marker("alone")]
    folder = common_folder(session.config)
    fresh = folder / f"alone-{os.getpid()}"
    fresh.write_text(json.dumps(alone))
    fresh.replace(folder / "alone.json")  # all workers write the same


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace the scheduler that -n chooses; others that --dist names stay what they are."""
    return _scheduler(config, log) if config.getvalue("dist") == "load" else None


def _scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScheduling  # needed for -n alone

    class FilesFirst(LoadScheduling):
        """``pending`` holds the tests that no worker has yet, by their index in ``collection``.

        A worker begins a test when it knows the next, or that there is none. It knows of three, so
        that it need not wait for an answer between two.
        """

        def schedule(self) -> None:
            if self.collection is None:
                if not self._check_nodes_have_same_collection():
                    return
                self.collection = next(iter(self.node2collection.values()))
                self.pending[:] = range(len(self.collection))
                self.alone = set(json.loads((common_folder(config) / "alone.json").read_text()))
                self.files = [name.partition("::")[0] for name in self.collection]
                self.taken: dict[WorkerController, str] = {}
            for node in self.nodes:
                self.check_schedule(node)

        def check_schedule(self, node: WorkerController, duration: float = 0) -> None:
            if node.shutting_down:
                return
            beside = [index for index in self.pending if index not in self.alone]
            while beside and len(self.node2pending[node]) < 3:
                index = self._choose(node, beside)
                beside.remove(index)
                self._send(node, [index])
            if beside:
                return
            others = [other for other in self.nodes if other is not node]
            if not self.pending or not all(other.shutting_down for other in others):
                node.shutdown()  # when it has run what it knows of
            elif not others:
                self._send(node, list(self.pending))
                node.shutdown()

        def remove_node(self, node: WorkerController) -> str | None:
            crashed = super().remove_node(node)
            if self.collection is None:  # a worker has ended without tests
                return crashed
            self.taken.pop(node, None)
            for other in self.nodes:
                self.check_schedule(other)  # the last one has waited for this
            return crashed

        def _choose(self, node: WorkerController, beside: list[int]) -> int:
            """A test for a worker: of its file, of one that nobody has taken, of the fullest."""
            mine = self.taken.get(node)
            others = {file for other, file in self.taken.items() if other is not node}
            for wanted in (lambda file: file == mine, lambda file: file not in others):
                for index in beside:
                    if wanted(self.files[index]):
                        self.taken[node] = self.files[index]
                        return index
            fullest = Counter(self.files[index] for index in beside).most_common(1)[0][0]
            return next(index for index in reversed(beside) if self.files[index] == fullest)

        def _send(self, node: WorkerController, indices: list[int]) -> None:
            for index in indices:
                self.pending.remove(index)
            self.node2pending[node].extend(indices)
            with contextlib.suppress(OSError):  # it has crashed: remove_node gets them back
                node.send_runtest_some(indices)

    return FilesFirst(config, log)

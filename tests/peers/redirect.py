"""A pytest plugin: imports of a peer's modules give our faces, and the outcome of each test is written to a file."""

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

MODULES, OUTCOMES = "PEER_MODULES", "PEER_OUTCOMES"  # environment variables: a mapping as JSON, the path of a file


class Redirect(MetaPathFinder, Loader):
    """Finds modules by their name in `modules`, and gives them the names of ours. Others of the package don't exist."""

    def __init__(self, modules: Mapping[str, str]):
        self.modules = modules

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self, is_package=True) if fullname in self.modules else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # Python's default

    def exec_module(self, module: ModuleType) -> None:
        ours = import_module(self.modules[module.__name__])
        module.__getattr__ = lambda name: getattr(ours, name)  # type: ignore[method-assign]
        module.__all__ = getattr(ours, "__all__", [name for name in vars(ours) if not name.startswith("_")])


class Recorder:
    """Collects outcomes: `passed`, `skipped`, or the error in one line."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def _record(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = _error(report)
        elif report.skipped or getattr(report, "when", "") == "call":
            self.outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._record(report)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:  # a file that can't be imported, or skips itself
            self._record(report)

    def pytest_sessionfinish(self) -> None:
        with open(os.environ[OUTCOMES], "w", encoding="utf-8") as file:
            json.dump(self.outcomes, file)


def _error(report: Any) -> str:
    """The error in one line: the message of an exception, or the end of what was printed of it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext.strip().rpartition("\n")[2]
    return " ".join(text.split()) or "failed"


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder())


if MODULES in os.environ:  # when pytest loads this file, before any other module is imported
    sys.meta_path.insert(0, Redirect(json.loads(os.environ[MODULES])))

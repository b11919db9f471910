"""Calls back when a module has been imported for the first time, whoever imports it and whenever."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class PostImport(importlib.abc.MetaPathFinder):
    """A finder that finds nothing itself: it lets the others find, and wraps what loads the modules waited for."""

    def __init__(self, callbacks: dict[str, Callback]) -> None:
        """Wait for the modules named in `callbacks`."""
        self._waiting = dict(callbacks)

    def install(self) -> None:
        """Stand before the other finders; what is imported already is called back for at once."""
        sys.meta_path.insert(0, self)
        for name in [name for name in self._waiting if name in sys.modules]:
            self._waiting.pop(name)(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the next finder has, with a loader that calls back."""
        callback = self._waiting.pop(fullname, None)
        if callback is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, callback)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads as the wrapped loader does, takes itself out again, then calls back."""

    def __init__(self, loader: Any, callback: Callback) -> None:
        self._loader, self._callback = loader, callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)

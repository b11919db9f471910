"""Calls back when a module has been imported for the first time, whoever imports it and whenever.

What finds and loads here bears no mark of `importlib.abc`, as nobody asks for it: that module is large, a script waits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

Watch = Callable[[str], Callback]
"""Told of a large module that is about to be executed; what it returns is called when that was done."""


class PostImport:
    """A finder that finds nothing itself: it lets the others find, and wraps what loads the modules waited for."""

    def __init__(self, callbacks: dict[str, Callback], large: Collection[str] = (), watch: Watch | None = None) -> None:
        """Wait for the modules named in `callbacks`; import those named in `large` without garbage collection."""
        self._waiting = dict(callbacks)
        self._large, self._watch = set(large), watch

    def install(self) -> None:
        """Stand before the other finders; what is imported already is called back for at once."""
        sys.meta_path.insert(0, self)
        for name in [name for name in self._waiting if name in sys.modules]:
            self._waiting.pop(name)(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the next finder has, with a loader that calls back."""
        callback, large = self._waiting.pop(fullname, None), fullname in self._large
        self._large.discard(fullname)
        if callback is None and not large:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    watch = self._watch if large else None
                    spec.loader = _Loader(spec.loader, callback, large, watch)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Loads as the wrapped loader does, takes itself out again, then calls back."""

    def __init__(self, loader: Any, callback: Callback | None, large: bool, watch: Watch | None) -> None:
        self._loader, self._callback, self._large, self._watch = loader, callback, large, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        done = None if self._watch is None else self._watch(module.__name__)
        with collector_at_rest() if self._large else contextlib.nullcontext():
            self._loader.exec_module(module)
        if done is not None:
            done(module)
        if self._callback is not None:
            self._callback(module)


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """No collection meanwhile, and none later of what is there by then.

    What a large package makes while it is imported stays; with TensorFlow 2.21, looking through it again and again is
    an eighth of the time of the import and of the first `fit`.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

"""A module waited for is called back once, after it was executed, and is otherwise as if nobody had waited."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest

from keepstep_worker.hook import PostImport


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "hooked_package"
    (root / "deep").mkdir(parents=True)
    (root / "__init__.py").write_text("from hooked_package.deep.target import value")
    (root / "deep" / "__init__.py").write_text("")
    (root / "deep" / "target.py").write_text("value = 1\nresult = value + 1")
    (root / "broken.py").write_text("value = 1\nraise LookupError")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield root
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "hooked_package"]:
        del sys.modules[name]


def test_it_calls_back_after_execution_and_before_the_importer_goes_on(package):
    called = []
    PostImport(
        {"hooked_package.deep.target": lambda module: called.append(module.result) or setattr(module, "value", 7)}
    ).install()
    module = importlib.import_module("hooked_package")
    assert called == [2]
    assert module.value == 7
    target = sys.modules["hooked_package.deep.target"]
    assert type(target.__loader__).__name__ == type(target.__spec__.loader).__name__ == "SourceFileLoader"
    assert target.__spec__.origin == str(package / "deep" / "target.py")


def test_it_calls_back_once(package):
    called = []
    PostImport({"hooked_package.deep.target": called.append}).install()
    module = importlib.import_module("hooked_package.deep.target")
    importlib.reload(module)
    assert called == [module]


def test_what_is_imported_already_is_called_back_for_at_once(package):
    module = importlib.import_module("hooked_package.deep.target")
    called = []
    PostImport({"hooked_package.deep.target": called.append}).install()
    assert called == [module]


def test_a_module_that_is_not_there_stays_missing(package):
    PostImport({"hooked_package.missing": pytest.fail}).install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_package.missing")


def test_a_module_that_fails_fails_as_before(package):
    PostImport({"hooked_package.broken": pytest.fail}).install()
    with pytest.raises(LookupError):
        importlib.import_module("hooked_package.broken")


@pytest.fixture
def collector():
    """The collector as it is by default, with nothing set aside."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def test_a_large_package_is_imported_without_collections_and_set_aside(package, collector):
    (package / "__init__.py").write_text("import gc\nenabled = gc.isenabled()\nmade = [[] for _ in range(100)]")
    PostImport({}, large=["hooked_package"]).install()
    module = importlib.import_module("hooked_package")
    assert not module.enabled
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100


def test_the_collector_is_on_again_after_an_import_that_fails(package, collector):
    PostImport({}, large=["hooked_package.broken"]).install()
    with pytest.raises(LookupError):
        importlib.import_module("hooked_package.broken")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off(package, collector):
    gc.disable()
    PostImport({}, large=["hooked_package"]).install()
    importlib.import_module("hooked_package")
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0

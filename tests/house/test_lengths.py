"""Tails, not medians, separate good houses from bad ones: so lengths have an upper bound."""

from __future__ import annotations

from tests.house.source import Function, functions, label, python_files

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6
CORE_LINES_MAX = 6250
VOCABULARY_NAMES = (
    *(
        "actions",
        "causes",
        "charge_events",
        "codec",
        "contradictions",
        "events",
        "facts",
        "failures",
        "fingerprints",
        "files_events",
        "gpu_events",
        "hang_events",
        "health_events",
        "health_knobs",
        "slab_events",
        "splits",
        "host_sample",
        "job",
        "policy",
        "profiles",
        "knobs",
        "quantities",
        "reasons",
    ),
    *("records", "stalls", "standby_events", "values", "view", "preflight_events", "preflight_records"),
)
VOCABULARY = {f"{name}.py" for name in VOCABULARY_NAMES}
"""Declarations: what is known, said and wanted. They decide nothing, and grow with every knob and every fact."""


def lines(path) -> int:
    return len(path.read_text().splitlines())


def parameters(function: Function) -> int:
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_no_module_is_too_long():
    long = {label(path): lines(path) for path in python_files("runtime", "tests", "benchmarks", "examples")}
    assert {name: count for name, count in long.items() if count > MODULE_LINES_MAX} == {}


def test_no_function_is_too_long():
    long = {
        f"{label(path, function.lineno)} {function.name}": function.end_lineno - function.lineno + 1
        for path in python_files("runtime", "tests", "benchmarks", "examples")
        for function in functions(path)
    }
    assert long
    assert {name: count for name, count in long.items() if count > FUNCTION_LINES_MAX} == {}


def test_no_function_has_too_many_parameters():
    counts = {
        f"{label(path, function.lineno)} {function.name}": parameters(function)
        for path in python_files("runtime", "benchmarks")
        for function in functions(path)
    }
    assert counts
    assert {name: count for name, count in counts.items() if count > PARAMETERS_MAX} == {}


def test_the_core_stays_small():
    core = python_files("runtime/keepstep/core")
    names = {path.name for path in core}
    assert "decide.py" in names
    assert names >= VOCABULARY
    assert sum(lines(path) for path in core if path.name not in VOCABULARY) <= CORE_LINES_MAX

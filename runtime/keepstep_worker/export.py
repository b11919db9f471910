"""A sealed slab turned into what TensorFlow and Keras read by themselves: what `keepstep checkpoint export` starts.

The model comes from a function of the user's, the builder, which makes it as the training script does; so the names of
its variables are those in the slab.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep_worker import variables as state
from keepstep_worker.slab import LOCAL, REPLICATED, SlabError
from keepstep_worker.slab_view import RestoreError, SlabView
from keepstep_worker.training import optimizers_of

MISFIT = 3
"""Exit code where the builder, or what it has built, does not do; standard error says why."""

WEIGHTS, WHOLE = ".weights.h5", ".keras"


class BuilderError(Exception):
    """The builder can not be used; the message says what was found and what is wanted."""


def main(arguments: list[str]) -> int:
    """Export one slab; see the arguments' help."""
    parser = argparse.ArgumentParser(prog="python -m keepstep_worker.export", description=__doc__)
    parser.add_argument("slab", type=Path, help="a sealed slab, that is, a safetensors file")
    parser.add_argument("step", type=int, help="the step whose state it holds")
    parser.add_argument("builder", help="FILE.py:FUNCTION")
    parser.add_argument(
        "target", type=Path, help=f"NAME{WEIGHTS}, NAME{WHOLE}, or what a tf.train.Checkpoint is called"
    )
    options = parser.parse_args(arguments)
    try:
        things = call_builder(options.builder)
        with options.slab.open("rb") as file:
            view = SlabView.open(file.fileno(), options.slab.stat().st_size, options.step)
        count = restore(view, things)
        write(things, options.step, options.target)
    except (BuilderError, RestoreError, SlabError) as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return MISFIT
    print(f"{count} variables")
    return 0


def call_builder(named: str) -> dict[str, Any]:
    """Return what the builder makes, by the names that `track()` would be given: a model alone is `model`.

    Args:
        named: FILE.py:FUNCTION.

    Raises:
        BuilderError: there is no such function, or it makes something else.
    """
    path, _, function = named.rpartition(":")
    spec = importlib.util.spec_from_file_location("__keepstep_builder__", path) if path else None
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise BuilderError(f"--builder: found {named}; wanted FILE.py:FUNCTION, a file that is there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise BuilderError(f"--builder: {path} has no function {function}; wanted one without arguments")
    made = build()
    things = dict(made) if isinstance(made, Mapping) else {"model": made}
    for name, thing in things.items():
        if not hasattr(thing, "variables"):
            wanted = "a model that is built, or a dict of models and optimizers by the names that track() has for them"
            raise BuilderError(f"--builder: {named} made {name}, a {type(thing).__name__}; wanted {wanted}")
        if not state.is_optimizer(thing) and not thing.variables:
            raise BuilderError(f"--builder: {named} made {name} without variables; wanted a model that is built")
    return things


def restore(view: SlabView, things: Mapping[str, Any]) -> int:
    """Assign the slab's tensors to what the builder has made, and return how many there were.

    What only a training needs (metrics, data positions, random states) stays in the slab; so do optimizers that the
    builder has not made.

    Raises:
        RestoreError: a variable is not in the slab, the slab has more of a model, or one is of another shape or type.
    """
    named: list[state.Named] = []
    taken: set[str] = set()
    for name, thing in sorted(things.items(), key=lambda item: state.is_optimizer(item[1])):
        if state.is_optimizer(thing):
            state.build_optimizer(thing, things.values())
            named += _as_saved(view, state.name_optimizer(name, thing, taken))
            continue
        metrics = {id(variable) for variable in getattr(thing, "metrics_variables", None) or ()}
        others = [variable for variable in thing.variables if id(variable) not in metrics]
        named += state.name_variables(name, thing.trainable_variables, others, taken)
        for optimizer in optimizers_of(thing) if name == "model" else ():
            state.build_optimizer(optimizer, [thing])
            named += _as_saved(view, state.name_optimizer("optimizer", optimizer, taken))
    prefixes = tuple(f"{REPLICATED}{name}/" for name, thing in things.items() if not state.is_optimizer(thing))
    state.assign(view, named, [key for key in view.places if key.startswith(LOCAL) or not key.startswith(prefixes)])
    return len(named)


def _as_saved(view: SlabView, named: list[state.Named]) -> list[state.Named]:
    """Name an optimizer's variables as the slab does.

    In tf_keras the slots of an optimizer that its first step has built have the optimizer's name before theirs, and
    those of one that was built beforehand, as here, have not.
    """
    found = []
    for key, variable in named:
        if key not in view:
            prefix, _, rest = key[len(REPLICATED) :].partition("/")
            begin, end = f"{REPLICATED}{prefix}/", f"/{rest}"
            scoped = [place for place in view.places if place.startswith(begin) and place.endswith(end)]
            key = scoped[0] if len(scoped) == 1 else key
        found.append((key, variable))
    return found


def write(things: Mapping[str, Any], step: int, target: Path) -> None:
    """Write the files; what stands under their names is replaced once they are whole.

    Raises:
        BuilderError: Keras's forms were asked for, and there is not one model.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if target.name.endswith((WEIGHTS, WHOLE)):
            model = _only_model(things, target)
            save = model.save_weights if target.name.endswith(WEIGHTS) else model.save
            save(str(folder / target.name))
        else:
            import tensorflow as tf

            saved = {**things, "step": tf.Variable(step, dtype=tf.int64)}
            for optimizer in optimizers_of(things["model"])[:1] if "model" in things else ():
                saved.setdefault("optimizer", optimizer)
            tf.train.Checkpoint(**saved).write(str(folder / target.name))
        for made in sorted(folder.iterdir(), key=lambda path: path.suffix == ".index"):  # which names the others
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.replace(target.with_name(made.name))
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def _only_model(things: Mapping[str, Any], target: Path) -> Any:
    models = [thing for thing in things.values() if hasattr(thing, "save_weights")]
    if len(models) != 1:
        raise BuilderError(
            f"--builder: made {len(models)} Keras models ({', '.join(things)}); wanted one for {target.name}, or a name"
            " without .keras and .h5, for a tf.train.Checkpoint of all"
        )
    return models[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Values of variables that are held while TensorFlow changes the variables, in all the ways there are to do so.

Prints one JSON object a case: whether the variables have changed since, and whether what was held is as it was.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy
import tensorflow as tf

from keepstep_worker import pages, reading, slab, variables

SHAPE = (300, 400)


def check(name: str, named: list[tuple[str, Any]], change: Callable[[], None], times: int = 3) -> None:
    for _ in range(times):
        tensors = variables.tensors_of(named, slab.Blobs())
        before = [variable.numpy().tobytes() for _, variable in named]
        held = [each for tensor in tensors for some in tensor.reader.read([tensor.thing]) for each in some]  # type: ignore[union-attr]
        ranges = [pages.range_of(each) for each in held]
        change()
        same, changed = True, False
        for lies_at, (_, variable), expected in zip(ranges, named, before):  # noqa: B905  it runs on Python 3.9, too
            same = same and ctypes.string_at(*lies_at) == expected
            changed = changed or variable.numpy().tobytes() != expected
        print(json.dumps({"case": name, "same": same, "changed": changed}), flush=True)


def named_of(*those: Any) -> list[tuple[str, Any]]:
    return [(f"replicated/{number}", variable) for number, variable in enumerate(those)]


def optimizers(keras: Any, kind: str) -> None:
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"):
        made = getattr(keras.optimizers, name, None)
        if made is None:
            continue
        for compiled in (False, True):
            variable = tf.Variable(tf.random.normal(SHAPE))
            optimizer = made(learning_rate=0.1)
            if hasattr(optimizer, "build"):
                optimizer.build([variable])

            @tf.function(jit_compile=compiled)
            def step(optimizer: Any = optimizer, variable: Any = variable) -> None:
                optimizer.apply_gradients([(tf.ones(SHAPE) * variable, variable)])

            step()  # those that make their slots on first use have them now
            own = [each for each in map(plain, optimizer_variables(optimizer)) if each.shape == SHAPE]
            check(f"{kind} {name}{' compiled' if compiled else ''}", named_of(variable, *own), step)


def optimizer_variables(optimizer: Any) -> list[Any]:
    found = optimizer.variables
    return list(found() if callable(found) else found)


def plain(variable: Any) -> Any:
    """TensorFlow's own variable, of one that Keras has wrapped."""
    return variable.value if hasattr(variable, "value") and not callable(variable.value) else variable


def assigned(dtype: str) -> None:
    variable = tf.Variable(tf.cast(tf.random.uniform(SHAPE, 0, 100), dtype))
    one = tf.ones(SHAPE, dtype)
    cases: dict[str, Callable[[], Any]] = {
        "assign": lambda: variable.assign(tf.identity(variable) + one),
        "assign_add": lambda: variable.assign_add(one),
        "assign_sub": lambda: variable.assign_sub(one),
        "slice": lambda: variable[3:5].assign(variable[3:5] + one[3:5]),
    }
    for name, change in cases.items():
        check(f"{name} {dtype}", named_of(variable), change)
        check(f"{name} {dtype} in a function", named_of(variable), tf.function(change))


def scattered() -> None:
    for name in ("scatter_add", "scatter_sub", "scatter_mul", "scatter_update", "scatter_max"):
        variable = tf.Variable(tf.random.normal(SHAPE))
        rows = tf.IndexedSlices(tf.fill((2, SHAPE[1]), 7.0), tf.constant([1, 5]))

        def change(name: str = name, variable: Any = variable, rows: Any = rows) -> None:
            getattr(variable, name)(rows)
            variable.assign_add(tf.ones(SHAPE))

        check(name, named_of(variable), change)
        check(f"{name} in a function", named_of(variable), tf.function(change))
    table = tf.Variable(tf.random.normal(SHAPE))
    optimizer = tf.keras.optimizers.Adam(0.1)

    @tf.function
    def look_up() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, [1, 5, 9])))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    look_up()
    own = [each for each in map(plain, optimizer_variables(optimizer)) if each.shape == SHAPE]
    check("rows of a table", named_of(table, *own), look_up)


def loops() -> None:
    variable = tf.Variable(tf.random.normal(SHAPE))

    @tf.function
    def several() -> None:
        for _ in tf.range(5):
            variable.assign_add(tf.ones(SHAPE))

    check("several in one function", named_of(variable), several)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        mirrored = tf.Variable(tf.random.normal(SHAPE))
        apart = tf.Variable(
            tf.random.normal(SHAPE), synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM, trainable=False,
        )  # fmt: skip

    @tf.function
    def replica() -> None:
        mirrored.assign_add(tf.ones(SHAPE))
        apart.assign_add(tf.ones(SHAPE))

    check("under a strategy", named_of(mirrored), lambda: strategy.run(replica))
    local = [("local/0", apart)]
    check("under a strategy, apart", local, lambda: strategy.run(replica))


def fitted(keras: Any, kind: str) -> None:
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(400), keras.layers.BatchNormalization()])
    model.compile("adam", "mse")
    inputs, labels = numpy.ones((8, 300), "float32"), numpy.ones((8, 400), "float32")
    model.fit(inputs, labels, verbose=0)
    those = [plain(each) for each in [*model.variables, *optimizer_variables(model.optimizer)]]
    seen = {id(each): each for each in those if each.dtype == tf.float32}
    check(f"{kind} fit", named_of(*seen.values()), lambda: model.fit(inputs, labels, verbose=0))


def main() -> None:
    optimizers(tf.keras, "keras")
    fitted(tf.keras, "keras")
    try:
        import tf_keras
    except ImportError:
        tf_keras = None
    if tf_keras is not None:
        optimizers(tf_keras, "tf_keras")
        if hasattr(tf_keras.optimizers, "legacy"):
            optimizers(type("legacy", (), {"optimizers": tf_keras.optimizers.legacy}), "legacy")
        fitted(tf_keras, "tf_keras")
    for dtype in ("float32", "float64", "float16", "bfloat16", "int64", "uint8"):
        assigned(dtype)
    scattered()
    loops()
    generator = tf.random.Generator.from_seed(1)
    check("a generator", named_of(generator.state), lambda: generator.normal((3,)))
    print(json.dumps({"left_alone": reading.are_left_alone()}), flush=True)


if __name__ == "__main__":
    sys.exit(main())

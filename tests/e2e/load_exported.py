"""Load what was exported in plain TensorFlow, without keepstep, and compare it with what the ranks ended with.

`load_exported.py BUILDER FILE RANK0.npz RANK1.npz [--legacy]`: what is local to a rank must be the mean of both, all
else rank 0's. Seeds are left out: not every format has them. Prints how many variables of which group were the same;
what is not is an AssertionError.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "jobs"))
import builders
import numpy as np
import tensorflow as tf
from common import final_variables, keras


def load(made: Any, file: str) -> dict[str, Any]:
    model = made["model"] if isinstance(made, dict) else made
    optimizer = made["optimizer"] if isinstance(made, dict) else model.optimizer
    if file.endswith(".keras"):
        model = keras.models.load_model(file)
        optimizer = getattr(model, "optimizer", None)
    elif file.endswith(".weights.h5"):
        model.load_weights(file)
        optimizer = None
    else:
        optimizer.build(model.trainable_variables)
        step = tf.Variable(0, dtype=tf.int64)
        tf.train.Checkpoint(model=model, optimizer=optimizer, step=step).read(file).expect_partial()
        assert step.numpy() > 0
    found = final_variables(model, optimizer or keras.optimizers.SGD())
    return {key: value for key, value in found.items() if optimizer or not key.startswith("optimizer")}


def main() -> None:
    name, file, *ranks = sys.argv[1:5]
    found = load(getattr(builders, name)(), file)
    first, second = (dict(np.load(rank)) for rank in ranks)
    same: Counter[str] = Counter()
    for key, value in found.items():
        wanted = first[key]
        if key.startswith("other/"):
            if wanted.dtype.kind != "f":
                continue
            wanted = (wanted + second[key]) / 2
        np.testing.assert_allclose(value, wanted, rtol=1e-6, err_msg=key)
        same[key.partition("/")[0]] += 1
    print(" ".join(f"{group}={count}" for group, count in sorted(same.items())))


if __name__ == "__main__":
    main()

"""What both training scripts share: data, model, and its variables at the end."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

FEATURES = 12


def make_data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(samples, FEATURES)).astype("float32")
    return x, x[:, :3].argmax(axis=1).astype("int32")


def build_model() -> Any:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(24, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )


def final_variables(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """This rank's own copies: trainable, all others (BatchNorm's statistics, dropout's seed), the optimizer's."""
    groups = {
        "trainable": model.trainable_variables,
        "other": model.non_trainable_variables,
        "optimizer": optimizer.variables,
    }
    return {
        f"{group}/{number}": np.asarray(getattr(variable.value, "values", [variable.value])[0])
        for group, variables in groups.items()
        for number, variable in enumerate(variables)
    }

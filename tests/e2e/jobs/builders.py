"""Builders for `keepstep checkpoint export`: the model as `fit.py` and `loop.py` make it, untrained."""

from __future__ import annotations

import sys
from typing import Any


def fitted() -> Any:
    """The model of fit.py, compiled as there."""
    from common import build_model, keras

    model = build_model()
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fitted_legacy() -> Any:
    """The same in tf_keras."""
    sys.argv.append("--legacy")
    return fitted()


def looped() -> dict[str, Any]:
    """What loop.py tracks."""
    from common import build_model, keras

    return {"model": build_model(), "optimizer": keras.optimizers.Adam(1e-2)}


def narrower() -> Any:
    """Another model."""
    from common import build_model

    return build_model(classes=2)


def unbuilt() -> Any:
    from common import keras

    return keras.Sequential([keras.layers.Dense(3)])

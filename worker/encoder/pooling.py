"""Converts the model's output to one vector for each text (pure)."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Pooling(enum.Enum):
    """The way to combine the vectors of a text's tokens into one."""

    CLS = "cls"  # that of the first token
    MEAN = "mean"  # their mean
    LAST = "last"  # that of the last token


class Activation(enum.Enum):
    """The function that is applied to a score."""

    SIGMOID = "sigmoid"
    IDENTITY = "identity"


def pooled(hidden: Floats, lengths: npt.NDArray[np.intp], pooling: Pooling) -> Floats:
    """One vector for each text, `[n, d]`. `hidden` `[n, t, d]` are the vectors of the tokens. Text i has `lengths[i]`
    tokens; the rest of its row is padding."""
    if pooling is Pooling.CLS:
        return np.array(hidden[:, 0])
    if pooling is Pooling.LAST:
        return np.array(hidden[np.arange(len(hidden)), lengths - 1])
    rows = [hidden[i, :length].mean(axis=0, dtype=np.float32) for i, length in enumerate(lengths.tolist())]
    return np.stack(rows)


def normalized(vectors: Floats) -> Floats:
    """The vectors scaled to length 1. A vector of zeros is unchanged."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def activated(scores: Floats, activation: Activation) -> Floats:
    """Apply the model's activation to `scores`, in the same shape: the sigmoid gives scores between 0 and 1."""
    if activation is Activation.IDENTITY:
        return scores
    # Of numbers below about -88, exp overflows to infinity, and the score is 0 as it should be.
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-scores)), np.float32)

"""The patches of an image in Qwen's towers: their order, and the angles of their rotary embeddings.

Patches of `side` times `side` become one token. They follow each other, so with a side of 2 and rows of 4 patches:

    0  1  4  5
    2  3  6  7
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
LongArray = npt.NDArray[np.int64]
_THETA = 10000.0


class Patches(NamedTuple):
    """A grid of patches: the rows and columns of patches, and the side of a token in patches."""

    rows: int
    columns: int
    side: int

    @property
    def places(self) -> tuple[LongArray, LongArray]:
        """The row and the column of each patch, in the order of patches."""
        shape = (self.rows // self.side, self.columns // self.side, self.side, self.side)
        token_row, token_column, row, column = np.indices(shape).reshape(4, -1)
        return token_row * self.side + row, token_column * self.side + column

    def angles(self, width: int) -> FloatArray:
        """`[patches, width]`: half of the angles grows with the row, half with the column."""
        exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        frequencies = np.float32(1.0) / np.power(np.float32(_THETA), exponents)
        rows, columns = self.places
        return np.concatenate(
            [np.multiply.outer(place.astype(np.float32), frequencies) for place in (rows, columns)], 1
        )

    def windows(self, side: int) -> tuple[LongArray, LongArray]:
        """Divided into windows of `side` times `side` tokens: the tokens, window by window, and the number of patches
        of each window."""
        row, column = np.indices((self.rows // self.side, self.columns // self.side)).reshape(2, -1)
        window = row // side * (self.columns + 1) + column // side
        # Stable, so the tokens of a window stay in reading order.
        order = np.argsort(window, kind="stable")
        _, counts = np.unique(window, return_counts=True)
        return order, counts * self.side**2

    def neighbours(self, side: int) -> tuple[LongArray, FloatArray]:
        """For a table of `side` times `side` places over which the grid is stretched: the four places around each
        patch, and their weights, both `[4, patches]`."""
        rows, columns = self.places
        row, column = (_stretched(count, side)[place] for count, place in ((self.rows, rows), (self.columns, columns)))
        above, left = row.astype(np.int64), column.astype(np.int64)
        below, right = np.minimum(above + 1, side - 1), np.minimum(left + 1, side - 1)
        down, across = row - above.astype(np.float32), column - left.astype(np.float32)
        up, back = 1 - down, 1 - across
        places = np.stack([above * side + left, above * side + right, below * side + left, below * side + right])
        return places, np.stack([up * back, up * across, down * back, down * across]).astype(np.float32)


def _stretched(count: int, side: int) -> FloatArray:
    """Where `count` rows lie among the `side` rows of a table, from its first to its last."""
    return np.linspace(0, side - 1, count, dtype=np.float64).astype(np.float32)

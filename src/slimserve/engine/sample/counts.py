"""Which tokens a sequence holds, and how often the output repeats them; kept up token by token for the penalties."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """Distinct token ids of prompt and output in order of appearance, each with its count in the output.

    Appending costs O(1); a step reads the arrays without walking the sequence again.
    """

    __slots__ = ("_ids", "_index", "_output")

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int] = ()) -> None:
        self._index: dict[int, int] = {token: i for i, token in enumerate(dict.fromkeys(prompt_token_ids))}
        count = len(self._index)
        self._ids: npt.NDArray[np.int64] = np.fromiter(self._index, dtype=np.int64, count=count)
        self._output: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        for token in output_token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        """Count one more output token."""
        place = self._index.get(token)
        if place is None:
            place = len(self._index)
            self._index[token] = place
            if place == self._ids.size:
                room = max(16, self._ids.size)
                self._ids = np.concatenate((self._ids, np.zeros(room, dtype=np.int64)))
                self._output = np.concatenate((self._output, np.zeros(room, dtype=np.int64)))
            self._ids[place] = token
        self._output[place] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct ids of prompt and output."""
        return self._ids[: len(self._index)]

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """How often each of `token_ids` stands in the output."""
        return self._output[: len(self._index)]

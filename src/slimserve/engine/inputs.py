"""The persistent input buffers of a step: filled in place on the host, copied once to the device.

On the CPU the device view is the host view. All of a step's integers live in three flat arrays per dtype and
group, so that their addresses never change (graphs can replay them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from slimserve.cache.contract import HostGroupInput, IntArray
from slimserve.cache.manager import CacheManager, CacheSequence
from slimserve.engine.step import StepPlan
from slimserve.layers.contract import BLOCK_TOKENS, NOT_USED, NULL_PAGE, GroupInput, StepInput
from slimserve.models.contract import CacheKind, CacheSpec


class _Buffer:
    """A host array and its device twin."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self._device = self._host if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.array: IntArray = self._host.numpy()

    def view(self, *extents: int) -> torch.Tensor:
        """The leading part on the device, after copying it there; the last axes are kept whole."""
        index = tuple(slice(extent) for extent in extents)
        if self._device is not self._host:
            self._device[index].copy_(self._host[index], non_blocking=True)
        return self._device[index]


class RowLike(Protocol):
    """What a row's place in the input follows from: a step's Row, or a drafter's InputRow."""

    @property
    def sequence(self) -> CacheSequence:
        """Whose pages and slots."""
        ...

    @property
    def start_position(self) -> int:
        """Absolute position of its first token."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Its tokens, at least one."""
        ...

    @property
    def num_logits(self) -> int:
        """Trailing tokens whose hidden states are wanted."""
        ...


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row of a drafter's own forward."""

    sequence: CacheSequence
    start_position: int
    token_ids: Sequence[int]
    num_logits: int = 1


class InputBuffers:
    """Buffers for steps of at most max_rows rows and max_tokens tokens.

    `specs` are the cache groups first_group, first_group + 1, ... of the manager; the groups before them are not
    filled (a drafter's layers read no cache of the trunk).
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        max_rows: int,
        max_tokens: int,
        max_context: int,
        device: torch.device,
        *,
        first_group: int = 0,
    ) -> None:
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._first_group = first_group
        max_blocks = -(-max_context // BLOCK_TOKENS)
        self._token_ids = _Buffer((max_tokens,), torch.int32, device)
        self._positions = _Buffer((max_tokens,), torch.int64, device)
        self._row_offsets = _Buffer((max_rows + 1,), torch.int32, device)
        self._start_positions = _Buffer((max_rows,), torch.int32, device)
        self._logit_indices = _Buffer((max_tokens,), torch.int64, device)
        self._arange = np.arange(max(max_context + 1, max_tokens), dtype=np.int64)
        self._specs = specs
        self._max_crossings = max_tokens // BLOCK_TOKENS + 1
        self._groups: list[tuple[_Buffer, _Buffer, _Buffer, _Buffer, _Buffer]] = []
        self._hosts: list[HostGroupInput] = []
        for spec in specs:
            recurrent = spec.kind is CacheKind.RECURRENT
            has_open = bool(spec.open) or recurrent
            buffers = (
                _Buffer((max_rows, 0 if recurrent else max_blocks), torch.int32, device),
                _Buffer((0 if recurrent else max_tokens,), torch.int64, device),
                _Buffer((max_rows if recurrent else 0,), torch.int32, device),
                _Buffer((max_rows * self._max_crossings if recurrent else 0,), torch.int32, device),
                _Buffer((max_rows if has_open else 0,), torch.int32, device),
            )
            self._groups.append(buffers)
            table, slots, state_in, state_out, open_index = (buffer.array for buffer in buffers)
            host = HostGroupInput(table, slots, state_in, state_out, open_index, [0] * max_rows)
            self._hosts.append(host)

    def fill(self, plan: StepPlan, cache: CacheManager) -> StepInput:
        """The device view of a plan; valid until the next call."""
        return self.fill_rows(plan.rows, cache)

    def fill_rows(self, rows: Sequence[RowLike], cache: CacheManager) -> StepInput:
        """The device view of rows; valid until the next call."""
        num_rows, num_tokens = len(rows), sum(len(row.token_ids) for row in rows)
        if num_rows > self.max_rows or num_tokens > self.max_tokens:
            raise ValueError(
                f"a step of {num_rows} rows and {num_tokens} tokens exceeds the buffers for {self.max_rows} rows and "
                f"{self.max_tokens} tokens"
            )
        crossings = max(1, *(_crossings(row.start_position, len(row.token_ids)) for row in rows))
        for (_, _, _, state_out, _), host in zip(self._groups, self._hosts, strict=True):
            if state_out.array.size:
                host.state_out = state_out.array[: num_rows * crossings].reshape(num_rows, crossings)
                host.state_out[:] = NULL_PAGE
        token = num_logits = max_q_len = max_context = 0
        for r, row in enumerate(rows):
            start, q_len = row.start_position, len(row.token_ids)
            end = token + q_len
            self._token_ids.array[token:end] = row.token_ids
            self._positions.array[token:end] = self._arange[start : start + q_len]
            self._start_positions.array[r] = start
            self._row_offsets.array[r + 1] = end
            if row.num_logits:
                self._logit_indices.array[num_logits : num_logits + row.num_logits] = self._arange[
                    end - row.num_logits : end
                ]
                num_logits += row.num_logits
            cache.fill(row.sequence, self._hosts, r, token, start, q_len, first_group=self._first_group)
            max_q_len, max_context = max(max_q_len, q_len), max(max_context, start + q_len)
            token = end
        return StepInput(
            token_ids=self._token_ids.view(num_tokens),
            positions=self._positions.view(num_tokens),
            row_offsets=self._row_offsets.view(num_rows + 1),
            start_positions=self._start_positions.view(num_rows),
            logit_indices=self._logit_indices.view(num_logits),
            groups=(
                *(GroupInput() for _ in range(self._first_group)),
                *(self._group_input(g, num_rows, num_tokens, crossings) for g in range(len(self._specs))),
            ),
            num_rows=num_rows,
            num_tokens=num_tokens,
            max_q_len=max_q_len,
            max_context=max_context,
        )

    def _group_input(self, group: int, num_rows: int, num_tokens: int, crossings: int) -> GroupInput:
        table, slots, state_in, state_out, open_index = self._groups[group]
        opened = open_index.view(num_rows) if open_index.array.size else NOT_USED
        if self._specs[group].kind is CacheKind.RECURRENT:
            written = state_out.view(num_rows * crossings).view(num_rows, crossings)
            return GroupInput(state_in=state_in.view(num_rows), state_out=written, open_index=opened)
        return GroupInput(block_table=table.view(num_rows), slots=slots.view(num_tokens), open_index=opened)


def _crossings(start: int, q_len: int) -> int:
    """Multiples of 64 in (start, start + q_len]."""
    return (start + q_len) // BLOCK_TOKENS - start // BLOCK_TOKENS

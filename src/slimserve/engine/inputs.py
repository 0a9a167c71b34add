"""The persistent input buffers of a step: filled in place on the host, copied once to the device.

On the CPU the device view is the host view. Every array has its place for good, so that graphs can replay steps of
one shape.
"""

from __future__ import annotations

import math
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
    """A host array and its device twin: a part of an arena, which copies it, or (block tables) copied by itself."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host = host
        self._device = device
        self.array: IntArray = host.numpy()

    def upload(self, rows: int) -> torch.Tensor:
        """The first `rows` rows on the device, after copying them there."""
        if self._device is not self._host:
            self._device[:rows].copy_(self._host[:rows], non_blocking=True)
        return self._device[:rows]

    def view(self, *extents: int) -> torch.Tensor:
        """The leading part on the device."""
        return self._device[tuple(slice(extent) for extent in extents)]


class _Arena:
    """Small arrays side by side in one pinned block, so that a step's integers cross to the device in one copy.

    A host array may be filled again only when the device has read it. Steps end with a wait for their tokens, so one
    arena per step in flight is enough.
    """

    ALIGNMENT = 256

    def __init__(self, device: torch.device) -> None:
        self._target = device
        self._wanted: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._host = self._device = torch.empty(0)

    def want(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Ask for an array; its number."""
        self._wanted.append((shape, dtype))
        return len(self._wanted) - 1

    def allocate(self) -> list[_Buffer]:
        """All arrays, by number."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._wanted]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // self.ALIGNMENT) * self.ALIGNMENT)
        self._host = _zeros((starts[-1],), torch.uint8, self._target)
        self._device = _twin(self._host, self._target)

        def part(block: torch.Tensor, number: int) -> torch.Tensor:
            shape, dtype = self._wanted[number]
            return block[starts[number] : starts[number] + sizes[number]].view(dtype).view(shape)

        shared = self._device is self._host
        buffers = []
        for number in range(len(sizes)):
            host = part(self._host, number)
            buffers.append(_Buffer(host, host if shared else part(self._device, number)))
        return buffers

    @property
    def num_bytes(self) -> int:
        """Bytes of the block on the device."""
        return self._device.numel()

    def upload(self) -> None:
        """Copy everything to the device."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def _twin(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else torch.zeros(host.shape, dtype=host.dtype, device=device)


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


@dataclass(frozen=True, slots=True)
class Padding:
    """A step widened to `num_rows` rows of q_len tokens each; `max_context` bounds every row's positions."""

    num_rows: int
    q_len: int
    max_context: int


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
        self.max_rows, self.max_tokens, self.max_context = max_rows, max_tokens, max_context
        self._first_group = first_group
        max_blocks = -(-max_context // BLOCK_TOKENS)
        self._arange = np.arange(max(max_context + 1, max_tokens), dtype=np.int64)
        self._specs = specs
        self._max_crossings = max_tokens // BLOCK_TOKENS + 1
        arena = self._arena = _Arena(device)
        fixed = [
            arena.want((max_tokens,), torch.int32),
            arena.want((max_tokens,), torch.int64),
            arena.want((max_rows + 1,), torch.int32),
            arena.want((max_rows,), torch.int32),
            arena.want((max_tokens,), torch.int64),
        ]
        wanted = []
        for spec in specs:
            recurrent = spec.kind is CacheKind.RECURRENT
            has_open = bool(spec.open) or recurrent
            wanted.append(
                (
                    arena.want((0 if recurrent else max_tokens,), torch.int64),
                    arena.want((max_rows if recurrent else 0,), torch.int32),
                    arena.want((max_rows * self._max_crossings if recurrent else 0,), torch.int32),
                    arena.want((max_rows if has_open else 0,), torch.int32),
                )
            )
        buffers = arena.allocate()
        self._token_ids, self._positions, self._row_offsets, self._start_positions, self._logit_indices = (
            buffers[number] for number in fixed
        )
        self._groups: list[tuple[_Buffer, _Buffer, _Buffer, _Buffer, _Buffer]] = []
        self._hosts: list[HostGroupInput] = []
        for spec, numbers in zip(specs, wanted, strict=True):
            columns = 0 if spec.kind is CacheKind.RECURRENT else max_blocks
            host_table = _zeros((max_rows, columns), torch.int32, device)
            table = _Buffer(host_table, _twin(host_table, device))
            slots, state_in, state_out, open_index = (buffers[number] for number in numbers)
            self._groups.append((table, slots, state_in, state_out, open_index))
            self._hosts.append(
                HostGroupInput(
                    table.array, slots.array, state_in.array, state_out.array, open_index.array, [0] * max_rows
                )
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays on the device."""
        return self._arena.num_bytes + sum(4 * table.array.size for table, *_ in self._groups)

    def fill(self, plan: StepPlan, cache: CacheManager) -> StepInput:
        """The device view of a plan; valid until the next call."""
        return self.fill_rows(plan.rows, cache)

    def fill_rows(self, rows: Sequence[RowLike], cache: CacheManager, padding: Padding | None = None) -> StepInput:
        """The device view of rows, followed by null rows where `padding` asks for them; valid until the next call."""
        num_rows, num_tokens = len(rows), sum(len(row.token_ids) for row in rows)
        if padding is not None:
            num_tokens += (padding.num_rows - num_rows) * padding.q_len
            num_rows = padding.num_rows
        if num_rows > self.max_rows or num_tokens > self.max_tokens:
            raise ValueError(
                f"a step of {num_rows} rows and {num_tokens} tokens exceeds the buffers for {self.max_rows} rows and "
                f"{self.max_tokens} tokens"
            )
        crossings = max([1, *(_crossings(row.start_position, len(row.token_ids)) for row in rows)])
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
        if padding is not None:
            num_logits = self._fill_null_rows(range(len(rows), num_rows), token, num_logits, padding.q_len)
            max_q_len, max_context = padding.q_len, padding.max_context
        self._arena.upload()
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

    def _fill_null_rows(self, rows: range, token: int, num_logits: int, q_len: int) -> int:
        """Rows of token 0 from position 0 on that own nothing: they read and write null pages, slots and buffers only.

        All are equal, so that what they write beside one another does not depend on who writes last. Returns the
        number of logits rows so far.
        """
        end = token + len(rows) * q_len
        self._token_ids.array[token:end] = 0
        for r in rows:
            self._positions.array[token : token + q_len] = self._arange[:q_len]
            self._start_positions.array[r] = 0
            token += q_len
            self._row_offsets.array[r + 1] = token
            self._logit_indices.array[num_logits : num_logits + q_len] = self._arange[token - q_len : token]
            num_logits += q_len
        first = end - len(rows) * q_len
        for host in self._hosts:
            host.slots[first:end] = NULL_PAGE
            host.state_in[rows.start : rows.stop] = NULL_PAGE
            host.open_index[rows.start : rows.stop] = NULL_PAGE
            for r in rows if host.block_table.shape[1] else ():
                host.block_table[r, : host.filled[r]] = NULL_PAGE
                host.filled[r] = 0
        return num_logits

    def _group_input(self, group: int, num_rows: int, num_tokens: int, crossings: int) -> GroupInput:
        table, slots, state_in, state_out, open_index = self._groups[group]
        opened = open_index.view(num_rows) if open_index.array.size else NOT_USED
        if self._specs[group].kind is CacheKind.RECURRENT:
            written = state_out.view(num_rows * crossings).view(num_rows, crossings)
            return GroupInput(state_in=state_in.view(num_rows), state_out=written, open_index=opened)
        return GroupInput(block_table=table.upload(num_rows), slots=slots.view(num_tokens), open_index=opened)


def _crossings(start: int, q_len: int) -> int:
    """Multiples of 64 in (start, start + q_len]."""
    return (start + q_len) // BLOCK_TOKENS - start // BLOCK_TOKENS

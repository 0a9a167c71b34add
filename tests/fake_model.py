"""A model that is a pure function of its tokens, computed from what it reads back through every kind of cache.

It stores token ids in pages, pools, boundary states and open buffers, and derives the next token from a hash of what
it finds there. Any wrong page, slot, open buffer, stale row or missing state shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slimserve.cache.budget import CachePlan, GroupPlan
from slimserve.layers.contract import Caches, StepInput
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec

VOCAB = 211
WINDOW = 100
POOL = 4
MAX_DRAFT = 8
RING = 64 + MAX_DRAFT + 1
RAW_RING = 2 * MAX_DRAFT + POOL
PRIME = 2_147_483_647
_POWERS = np.ones(1 << 14, dtype=np.int64)
for _i in range(1, _POWERS.size):
    _POWERS[_i] = _POWERS[_i - 1] * 48_271 % PRIME

ALL_KINDS = (CacheKind.ATTENTION, CacheKind.WINDOW, CacheKind.LATENT, CacheKind.INDEXER, CacheKind.RECURRENT)


def digest(values: np.ndarray, salt: int) -> int:
    """A hash of a sequence of integers that depends on their order."""
    if values.size == 0:
        return salt
    return int((((values + 7) * _POWERS[: values.size]) % PRIME).sum() * salt % PRIME)


def fold_state(state: int, chunk: np.ndarray) -> int:
    """The recurrent state after one more chunk of 64 tokens."""
    return (state * 69_621 + digest(chunk, 5)) % PRIME


def next_token(tokens: Sequence[int], kinds: tuple[CacheKind, ...] = ALL_KINDS) -> int:
    """What the model says after `tokens`, computed without any cache."""
    array = np.asarray(tokens, dtype=np.int64)
    total = 0
    if CacheKind.ATTENTION in kinds:
        total += digest(array, 2)
    if CacheKind.WINDOW in kinds:
        total += digest(array[-WINDOW:], 3)
    if CacheKind.LATENT in kinds:
        total += digest(array, 11)
    if CacheKind.INDEXER in kinds:
        whole = array.size // POOL * POOL
        total += digest(array[:whole].reshape(-1, POOL).sum(axis=1), 13) + digest(array[whole:], 17)
    if CacheKind.RECURRENT in kinds:
        whole = array.size // 64 * 64
        state = 0
        for start in range(0, whole, 64):
            state = fold_state(state, array[start : start + 64])
        total += state + digest(array[whole:], 19)
    return total % VOCAB


def continuation(tokens: Sequence[int], count: int, kinds: tuple[CacheKind, ...] = ALL_KINDS) -> list[int]:
    """The next `count` tokens."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known, kinds))
    return known[len(tokens) :]


def cache_table(kinds: tuple[CacheKind, ...] = ALL_KINDS) -> tuple[CacheSpec, ...]:
    """One group per kind; the latent group shares its layer with the indexer."""
    integer = torch.int64
    specs = {
        CacheKind.ATTENTION: CacheSpec(
            "full",
            CacheKind.ATTENTION,
            (0,),
            page=(BufferSpec("k", (1, 64, 1), integer), BufferSpec("v", (1, 64, 1), integer)),
        ),
        CacheKind.WINDOW: CacheSpec(
            "window",
            CacheKind.WINDOW,
            (1,),
            page=(BufferSpec("k", (1, 64, 1), integer), BufferSpec("v", (1, 64, 1), integer)),
            window=WINDOW,
        ),
        CacheKind.LATENT: CacheSpec("latent", CacheKind.LATENT, (2,), page=(BufferSpec("latent", (64, 1), integer),)),
        CacheKind.INDEXER: CacheSpec(
            "indexer",
            CacheKind.INDEXER,
            (2,),
            page=(BufferSpec("keys", (64 // POOL, 1), integer),),
            open=(BufferSpec("raw", (RAW_RING, 2), integer),),
        ),
        CacheKind.RECURRENT: CacheSpec(
            "recurrent",
            CacheKind.RECURRENT,
            (3,),
            slot=(BufferSpec("state", (1, 1, 1), integer), BufferSpec("conv_tail", (3, 1), integer)),
            open=tuple(
                BufferSpec(name, (RING, *tail), integer)
                for name, tail in (("open_conv", (1,)), ("open_k", (1, 1)), ("open_g", (1,)), ("open_d", (1, 1)))
            ),
        ),
    }
    return tuple(specs[kind] for kind in kinds)


def explicit_plan(demand, counts: Sequence[tuple[int, int]], kinds: tuple[CacheKind, ...] = ALL_KINDS) -> CachePlan:
    """A plan with chosen (units, open buffers) per group, without the null units."""
    groups = tuple(
        GroupPlan(
            spec.name,
            spec.kind,
            units + 1,
            num_open + 1 if num_open else 0,
            spec.page_bytes() + spec.slot_bytes(),
            spec.open_bytes(),
            float(units),
        )
        for spec, (units, num_open) in zip(cache_table(kinds), counts, strict=True)
    )
    used = sum(group.total_bytes for group in groups)
    return CachePlan(demand, groups, used, counts[0][0])


@dataclass(frozen=True)
class FakeConfig:
    """The part of a model config that the engine reads."""

    kinds: tuple[CacheKind, ...] = ALL_KINDS
    architecture: str = "fake"
    vocab_size: int = VOCAB
    hidden_size: int = 1
    num_layers: int = 4
    max_context: int = 4096

    def parameters(self) -> tuple[()]:
        return ()

    def caches(self, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        return cache_table(self.kinds)


class FakeModel:
    """See the module. `fail_on` maps a token id to what happens when it is fed: "raise" or "nan".

    `fault` strikes the next step once: the chosen row's caches get garbage, and then the step raises ("raise") or
    the row's values are not finite ("nan").
    """

    def __init__(self, kinds: tuple[CacheKind, ...] = ALL_KINDS, max_context: int = 4096) -> None:
        self.config = FakeConfig(kinds, max_context=max_context)
        self.fail_on: dict[int, str] = {}
        self.fault: tuple[str, int] | None = None
        self.num_tokens = 0
        self.num_null_rows = 0

    def __call__(self, step: StepInput, caches: Caches) -> torch.Tensor:
        tokens = step.token_ids.numpy().astype(np.int64)
        offsets = step.row_offsets.tolist()
        wanted = set(step.logit_indices.tolist())
        hidden = np.zeros((step.num_tokens, 1), dtype=np.float32)
        assert len(offsets) == step.num_rows + 1 and offsets[-1] == step.num_tokens == tokens.size
        self.num_tokens += step.num_tokens
        fault, self.fault = self.fault, None
        null = [self._is_null(step, caches, r) for r in range(step.num_rows)]
        assert null == sorted(null), "null rows stand behind the others"
        struck = -1 if fault is None else fault[1] % (step.num_rows - sum(null))
        for r, start in enumerate(step.start_positions.tolist()):
            own = tokens[offsets[r] : offsets[r + 1]]
            if null[r]:
                self.num_null_rows += 1
                self._check_null(step, caches, r, own)
                continue
            positions = step.positions[offsets[r] : offsets[r + 1]].tolist()
            assert positions == list(range(start, start + own.size))
            for token in own.tolist():
                if self.fail_on.get(token) == "raise":
                    raise RuntimeError(f"token {token} breaks the step")
            opened = {
                kind: self._opened(step, caches, r, start, own, kind)
                for kind in self.config.kinds
                if kind in (CacheKind.INDEXER, CacheKind.RECURRENT)
            }
            if r == struck:
                garbage = np.full_like(own, 1_000_003)
                opened = {kind: np.concatenate((rows[: -own.size], garbage)) for kind, rows in opened.items()}
                self._write(step, caches, r, offsets[r], start, garbage, opened)
                hidden[offsets[r] : offsets[r + 1]] = np.nan
                continue
            self._write(step, caches, r, offsets[r], start, own, opened)
            for i in range(own.size):
                if offsets[r] + i in wanted:
                    hidden[offsets[r] + i] = self._read(step, caches, r, start, start + i, opened)
                if self.fail_on.get(int(own[i])) == "nan":
                    hidden[offsets[r] + i] = np.nan
        if fault is not None and fault[0] == "raise":
            raise RuntimeError("this step was meant to fail")
        return torch.from_numpy(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """A peak at the next token, with the runners-up in a fixed order so that log probabilities mean something."""
        ids = torch.arange(VOCAB)
        distance = (ids[None, :] - hidden) % VOCAB
        return -distance.float() / 8

    def _is_null(self, step, caches, r) -> bool:
        """Whether the row owns no page and no open buffer."""
        groups = [self._storage(step, caches, kind)[1] for kind in self.config.kinds]
        owned = [group.block_table[r] for group in groups if group.block_table.numel()]
        opened = [group.open_index[r] for group in groups if group.open_index.numel()]
        return not any(bool(index.any()) for index in (*owned, *opened))

    def _check_null(self, step, caches, r, own) -> None:
        first = int(step.row_offsets[r])
        assert not own.any() and int(step.start_positions[r]) == 0
        assert step.positions[first : first + own.size].tolist() == list(range(own.size))
        for kind in self.config.kinds:
            group = self._storage(step, caches, kind)[1]
            if kind is CacheKind.RECURRENT:
                assert not group.state_in[r] and not group.state_out[r].any()
            else:
                assert not group.slots[first : first + own.size].any()

    def _storage(self, step, caches, kind):
        layer = {CacheKind.ATTENTION: 0, CacheKind.WINDOW: 1, CacheKind.RECURRENT: 3}.get(kind, 2)
        name = {CacheKind.ATTENTION: "attention", CacheKind.WINDOW: "attention"}.get(kind, kind.value)
        storage = getattr(caches[layer], name)
        return storage, step.groups[storage.group]

    def _write(self, step, caches, r, first, start, own, opened) -> None:
        end = start + own.size
        for kind in self.config.kinds:
            storage, group = self._storage(step, caches, kind)
            if kind is CacheKind.RECURRENT:
                self._advance(storage, group, r, start, own, opened[kind])
                continue
            slots = group.slots[first : first + own.size].numpy()
            table = group.block_table[r].numpy()
            expected = table[np.arange(start, end) // 64].astype(np.int64) * 64 + np.arange(start, end) % 64
            assert (slots == expected).all() and (slots >= 64).all(), "write slots and block table disagree"
            if kind in (CacheKind.ATTENTION, CacheKind.WINDOW):
                storage.k.numpy().reshape(-1)[slots] = own
                storage.v.numpy().reshape(-1)[slots] = own + 1
            elif kind is CacheKind.LATENT:
                storage.latent.numpy().reshape(-1)[slots] = own
            else:
                self._pool(storage, table, int(group.open_index[r]), start, own)

    def _pool(self, storage, table, buffer, start, own) -> None:
        raw = storage.raw.numpy()[buffer]
        for i, token in enumerate(own.tolist()):
            position = start + i
            raw[position % RAW_RING] = (token, position)
            if position % POOL == POOL - 1:
                members = np.arange(position - POOL + 1, position + 1)
                rows = raw[members % RAW_RING]
                assert (rows[:, 1] == members).all(), "rows of the open pool are missing"
                storage.keys.numpy()[table[position // 64], position % 64 // POOL, 0] = rows[:, 0].sum()

    def _advance(self, storage, group, r, start, own, known) -> None:
        buffer = int(group.open_index[r])
        state_out = group.state_out[r].tolist()
        state = self._state(storage, group, r, start // 64 * 64)
        for crossing in range(known.size // 64):
            chunk = known[crossing * 64 : crossing * 64 + 64]
            state = fold_state(state, chunk)
            slot = state_out[crossing]
            if slot:
                storage.state.numpy()[slot] = state
                storage.conv_tail.numpy()[slot, :, 0] = chunk[61:]
        assert not any(state_out[known.size // 64 :]), "a slot for a boundary that the row does not reach"
        positions = np.arange(start, start + own.size)[-RING:]
        storage.open_conv.numpy()[buffer, positions % RING, 0] = own[-RING:]
        storage.open_k.numpy()[buffer, positions % RING, 0, 0] = positions

    def _opened(self, step, caches, r, start, own, kind) -> np.ndarray:
        """Tokens since the last whole pool or chunk before `start`: what the open buffer holds, then the row's own."""
        storage, group = self._storage(step, caches, kind)
        buffer = int(group.open_index[r])
        assert buffer > 0, "no open buffer"
        if kind is CacheKind.INDEXER:
            before = np.arange(start // POOL * POOL, start)
            rows = storage.raw.numpy()[buffer][before % RAW_RING]
            tokens, stamps = rows[:, 0], rows[:, 1]
        else:
            before = np.arange(start // 64 * 64, start)
            tokens = storage.open_conv.numpy()[buffer, before % RING, 0]
            stamps = storage.open_k.numpy()[buffer, before % RING, 0, 0]
        assert (stamps == before).all(), f"{kind.value}: rows of the open buffer are missing"
        return np.concatenate((tokens, own))

    def _state(self, storage, group, r, base) -> int:
        slot = int(group.state_in[r])
        assert (slot > 0) == (base > 0), "state_in disagrees with the row's start"
        return int(storage.state.numpy()[slot, 0, 0, 0]) if slot else 0

    def _read(self, step, caches, r, start, position, opened) -> int:
        """The next token after `position`, from the caches and the open rows `opened` (as of the row's end)."""
        total = 0
        count = position + 1
        for kind in self.config.kinds:
            storage, group = self._storage(step, caches, kind)
            if kind is CacheKind.RECURRENT:
                rows = opened[kind][: count - start // 64 * 64]
                state = self._state(storage, group, r, start // 64 * 64)
                for first in range(0, rows.size // 64 * 64, 64):
                    state = fold_state(state, rows[first : first + 64])
                total += state + digest(rows[rows.size // 64 * 64 :], 19)
                continue
            table = group.block_table[r].numpy()
            first = max(0, count - WINDOW) if kind is CacheKind.WINDOW else 0
            where = np.arange(first, count)
            pages = table[where // 64].astype(np.int64)
            assert (pages > 0).all(), f"{kind.value}: the table lacks a page that is read"
            slots = pages * 64 + where % 64
            if kind in (CacheKind.ATTENTION, CacheKind.WINDOW):
                values = storage.k.numpy().reshape(-1)[slots]
                assert (storage.v.numpy().reshape(-1)[slots] == values + 1).all()
                total += digest(values, 2 if kind is CacheKind.ATTENTION else 3)
            elif kind is CacheKind.LATENT:
                total += digest(storage.latent.numpy().reshape(-1)[slots], 11)
            else:
                pools = np.arange(count // POOL)
                keys = storage.keys.numpy()[table[pools * POOL // 64], pools * POOL % 64 // POOL, 0]
                tail = opened[kind][count // POOL * POOL - start // POOL * POOL : count - start // POOL * POOL]
                total += digest(keys, 13) + digest(tail, 17)
        return total % VOCAB

"""DFlash2: drafts a whole block at once from the target's hidden states, then walks its best candidates.

Context rows c = hidden_norm(fc(cat of the target's tapped layer outputs)) only give keys and values to each layer; no
query is computed for them. A block is an anchor (the last known token) and K mask tokens behind it. Its rows see the
context through the window, and one another in both directions. A grouped two-tap convolution whose coefficients
depend on the row stands before and behind attention and MLP. A low-rank selector scores which of the best candidates
of a position follows which of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slimserve import ops
from slimserve.layers.contract import AttentionStorage, Caches, GroupInput, StepInput
from slimserve.layers.embedding import Head
from slimserve.layers.mlp import Activation, GatedMLP
from slimserve.layers.norm import RMSNorm
from slimserve.layers.rotary import Rotary
from slimserve.models.dflash2_config import CONV_TAPS, DFlash2Config
from slimserve.models.parameters import Parameters
from slimserve.ops import LinearWeight
from slimserve.ops.reference.order import tree_sum


@dataclass(frozen=True, slots=True)
class BlockInput:
    """Blocks of 1 + K rows: T rows in all, K may differ between blocks.

    step: the blocks as ordinary rows. from_start and to_end [T]: rows before and behind each row in its block.
    block_of [T]: the block that a row belongs to. by_distance[d]: the rows d before their block's end.
    """

    step: StepInput
    from_start: torch.Tensor
    to_end: torch.Tensor
    block_of: torch.Tensor
    by_distance: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, step: StepInput, lengths: Sequence[int]) -> BlockInput:
        """The blocks of a step whose rows have these lengths."""
        ends = [length - 1 - i for length in lengths for i in range(length)]
        table = [
            [i for length in lengths for i in range(length)],
            ends,
            [number for number, length in enumerate(lengths) for _ in range(length)],
        ]
        from_start, to_end, block_of = torch.tensor(table).to(step.positions.device)
        places = [torch.tensor([t for t, end in enumerate(ends) if end == d]) for d in range(max(lengths))]
        return cls(step, from_start, to_end, block_of, tuple(p.to(step.positions.device) for p in places))

    def every_row(self, group: GroupInput) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(block table [T, blocks], row offsets [T + 1], positions [T]) that let each row see its whole block: every
        row is a row of one token, at the position of its block's last one."""
        step = self.step
        last = (step.positions + self.to_end).to(torch.int32)
        offsets = torch.arange(step.num_tokens + 1, dtype=torch.int32, device=last.device)
        return group.block_table[self.block_of], offsets, last


class GroupedConvolution:
    """out[t, c] = sum over taps of (base[side, tap, c] + D[t, side, tap, c / group]) * in[t - tap, c].

    D = projection(x) of the sublayer's input serves side 0 (before the sublayer) and side 1 (behind it). Nothing
    stands before a block's first row. Sums are float32.
    """

    def __init__(self, base: torch.Tensor, projection: LinearWeight, group_size: int) -> None:
        """base [2, taps, H] float32."""
        self.base = base
        self.projection = projection
        self.group_size = group_size

    def coefficients(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, 2, taps, H] float32."""
        dynamic = ops.linear(x, self.projection, out_dtype=torch.float32).view(x.shape[0], 2, CONV_TAPS, -1)
        return self.base + dynamic.repeat_interleave(self.group_size, dim=-1)

    def __call__(self, x: torch.Tensor, coefficients: torch.Tensor, side: int, block: BlockInput) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        own = x.float()
        before = torch.zeros_like(own)
        before[1:] = own[:-1]
        before.masked_fill_((block.from_start == 0).unsqueeze(1), 0.0)
        out = coefficients[:, side, 0] * own + coefficients[:, side, 1] * before
        return out.to(x.dtype)


class DFlash2Layer:
    """One drafter layer; a Qwen3 block with a convolution around each sublayer."""

    def __init__(self, config: DFlash2Config, layer: int, rotary: Rotary, parameters: Parameters) -> None:
        own = f"layers.{layer}"
        self.config = config
        self.window = config.windows[layer]
        self.rotary = rotary

        def norm(name: str) -> RMSNorm:
            return RMSNorm(parameters.tensor(f"{own}.{name}"), config.norm_eps)

        def convolution(name: str) -> GroupedConvolution:
            base = parameters.tensor(f"{own}.{name}.base")
            return GroupedConvolution(base, parameters.linear(f"{own}.{name}.projection"), config.conv_group_size)

        self.input_norm, self.mlp_norm = norm("input_norm"), norm("mlp_norm")
        self.q_norm, self.k_norm = norm("q_norm"), norm("k_norm")
        self.q = parameters.linear(f"{own}.q")
        self.kv = parameters.linear(f"{own}.k", f"{own}.v")
        self.o = parameters.linear(f"{own}.o")
        gate_up = parameters.linear(f"{own}.gate", f"{own}.up")
        self.mlp = GatedMLP(gate_up, parameters.linear(f"{own}.down"), Activation.SILU)
        self.attention_conv, self.mlp_conv = convolution("attention_conv"), convolution("mlp_conv")

    def write(self, x: torch.Tensor, step: StepInput, cache: AttentionStorage) -> None:
        """Keys and values of rows x [T, H] at the step's positions."""
        kv_heads = self.config.num_kv_heads
        heads = ops.linear(x, self.kv).view(x.shape[0], 2 * kv_heads, self.config.head_dim)
        k = self.k_norm(heads[:, :kv_heads].contiguous())
        self.rotary(k, step.positions)
        slots = step.groups[cache.group].slots
        ops.write_pages(k, cache.k, slots)
        ops.write_pages(heads[:, kv_heads:], cache.v, slots)

    def __call__(self, x: torch.Tensor, block: BlockInput, cache: AttentionStorage) -> torch.Tensor:
        """Residual stream x [T, H] of block rows -> [T, H]."""
        h = self.input_norm(x)
        coefficients = self.attention_conv.coefficients(h)
        mixed = self._attend(self.attention_conv(h, coefficients, 0, block), block, cache)
        x = x + self.attention_conv(mixed, coefficients, 1, block)
        h = self.mlp_norm(x)
        coefficients = self.mlp_conv.coefficients(h)
        fed = self.mlp(self.mlp_conv(h, coefficients, 0, block))
        return x + self.mlp_conv(fed, coefficients, 1, block)

    def _attend(self, x: torch.Tensor, block: BlockInput, cache: AttentionStorage) -> torch.Tensor:
        self.write(x, block.step, cache)
        q = self.q_norm(ops.linear(x, self.q).view(x.shape[0], self.config.num_heads, self.config.head_dim))
        self.rotary(q, block.step.positions)
        step, group = block.step, block.step.groups[cache.group]
        if self.config.causal:
            rows = (group.block_table, step.row_offsets, step.start_positions)
            out = self._attention(q, cache, rows, self.window, step.max_q_len, step.max_context)
        else:
            out = self._see_all(q, block, cache, block.every_row(group))
        return ops.linear(out.reshape(x.shape[0], -1), self.o)

    def _see_all(
        self,
        q: torch.Tensor,
        block: BlockInput,
        cache: AttentionStorage,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Every row sees its window and the rest of its block. The window ends at a row's own position, but attention
        runs from the block's last one: a row d before it has a window that is d longer."""
        context = block.step.max_context
        if self.window is None or context <= self.window:
            return self._attention(q, cache, rows, None, 1, context)
        table, offsets, last = rows
        out = torch.empty_like(q)
        for distance, places in enumerate(block.by_distance):
            part = (table[places], offsets[: places.numel() + 1], last[places])
            out[places] = self._attention(q[places], cache, part, self.window + distance, 1, context)
        return out

    def _attention(
        self,
        q: torch.Tensor,
        cache: AttentionStorage,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        window: int | None,
        max_q_len: int,
        max_context: int,
    ) -> torch.Tensor:
        table, offsets, starts = rows
        return ops.paged_attention(
            q,
            cache.k,
            cache.v,
            table,
            offsets,
            starts,
            scale=self.config.head_dim**-0.5,
            window=window,
            max_q_len=max_q_len,
            max_context=max_context,
        )


class DFlash2Model:
    """The drafter's own weights; embedding and, where the file has none, output head are the target's."""

    def __init__(self, config: DFlash2Config, parameters: Parameters) -> None:
        self.config = config
        rotary = Rotary(config.rope, parameters.device)
        self.fc = parameters.linear("fc")
        self.hidden_norm = RMSNorm(parameters.tensor("hidden_norm"), config.norm_eps)
        self.layers = [DFlash2Layer(config, layer, rotary, parameters) for layer in range(config.num_layers)]
        self.norm = RMSNorm(parameters.tensor("norm"), config.norm_eps)
        self.predecessor = parameters.table("selector.predecessor")
        self.successor = parameters.table("selector.successor")
        self.selector_hidden = parameters.linear("selector.hidden")
        self.head = Head(parameters.head("head", None)) if config.own_head else None

    def write_context(self, tapped: torch.Tensor, step: StepInput, caches: Caches) -> None:
        """Keys and values of committed tokens from tapped [T, taps * H]."""
        rows = self.hidden_norm(ops.linear(tapped, self.fc))  # [T, H]
        for layer, cache in zip(self.layers, caches, strict=True):
            assert cache.attention is not None, "the cache table names attention storage for every layer"
            layer.write(rows, step, cache.attention)

    def hidden(self, embedded: torch.Tensor, block: BlockInput, caches: Caches) -> torch.Tensor:
        """embedded [T, H] of the block rows -> states after the final norm [T, H]."""
        x = embedded if self.config.embedding_scale == 1.0 else embedded * self.config.embedding_scale
        for layer, cache in zip(self.layers, caches, strict=True):
            assert cache.attention is not None, "the cache table names attention storage for every layer"
            x = layer(x, block, cache.attention)
        return self.norm(x)

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The drafter's own multiplier and softcap on head outputs [N, V] float32."""
        config = self.config
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        if config.softcap is not None:
            logits = torch.tanh(logits / config.softcap) * config.softcap
        return logits

    def transitions(
        self, hidden: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """score[n, p, c] = logit_c + sum_r A[previous_p]_r (Hproj hidden)_r B[candidate_c]_r, float32 [N, P, C].

        hidden [N, H] after the final norm; previous [N, P] and candidates [N, C] token ids; logits [N, C] float32.
        """
        count, rank = candidates.shape[0], self.config.selector_rank
        projected = ops.linear(hidden, self.selector_hidden, out_dtype=torch.float32)  # [N, R]
        left = ops.embedding(previous.flatten(), self.predecessor, torch.float32).view(count, -1, rank)
        right = ops.embedding(candidates.flatten(), self.successor, torch.float32).view(count, -1, rank)
        left = left * projected.unsqueeze(1)
        # One row at a time: the product is P * C * R floats, and its sum must not depend on how many rows there are.
        pairs = [tree_sum(left[n].unsqueeze(1) * right[n].unsqueeze(0)) for n in range(count)]
        return logits.unsqueeze(1) + torch.stack(pairs)

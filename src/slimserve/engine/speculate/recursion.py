"""Drafts one after another: each is the next input of the drafting layer or model, for all requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slimserve.engine.request import Request
from slimserve.engine.speculate.draws import DraftSampler
from slimserve.layers.contract import BLOCK_TOKENS, GroupInput, StepInput

Forward = Callable[[torch.Tensor, torch.Tensor, StepInput], torch.Tensor]
"""(token ids [R] int32, their predecessors' hidden states [R, H], step) -> hidden states [R, H]."""


def draft_one_by_one(
    requests: Sequence[Request],
    limits: Sequence[int],
    hidden: torch.Tensor,
    sampler: DraftSampler,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    first_step: Callable[[int], StepInput],
    forward: Forward,
) -> list[list[int]]:
    """limits[i] tokens for each request, from hidden [R, H] that its first draft follows from.

    `limits` must fall: rows that have drafted enough leave the batch at its end. first_step(n) is the input of the
    first n rows at the position behind the known tokens. The host waits for the device once, at the end.
    """
    sampler.start(requests)
    step: StepInput | None = None
    drawn: list[torch.Tensor] = []
    for offset in range(limits[0]):
        tokens = sampler.draw(logits_of(hidden), requests[: hidden.shape[0]], offset)
        drawn.append(tokens)
        rows = sum(limit > offset + 1 for limit in limits)
        if not rows:
            break
        step = first_step(rows) if step is None else _following(step, rows)
        hidden = forward(tokens[:rows].to(torch.int32), hidden[:rows], step)
    flat = iter(torch.cat(drawn).tolist())
    result: list[list[int]] = [[] for _ in requests]
    for tokens in drawn:
        for r in range(tokens.shape[0]):
            result[r].append(next(flat))
    return result


def _following(step: StepInput, num_rows: int) -> StepInput:
    """The first num_rows rows of a step of single tokens, one position on; made on the device."""
    positions = step.positions[:num_rows] + 1
    groups = []
    for group in step.groups:
        if not group.slots.numel():
            groups.append(group)
            continue
        table = group.block_table[:num_rows]
        pages = table.gather(1, (positions // BLOCK_TOKENS).unsqueeze(1)).squeeze(1).long()
        slots = pages * BLOCK_TOKENS + positions % BLOCK_TOKENS
        opened = group.open_index[:num_rows] if group.open_index.numel() else group.open_index
        groups.append(GroupInput(block_table=table, slots=slots, open_index=opened))
    return StepInput(
        token_ids=step.token_ids[:num_rows],
        positions=positions,
        row_offsets=step.row_offsets[: num_rows + 1],
        start_positions=step.start_positions[:num_rows] + 1,
        logit_indices=step.logit_indices[:num_rows],
        groups=tuple(groups),
        num_rows=num_rows,
        num_tokens=num_rows,
        max_q_len=1,
        max_context=step.max_context + 1,
    )

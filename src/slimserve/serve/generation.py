"""One HTTP request's choices, from the engine's acceptance to the end of the last one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from slimserve.engine.messages import Submit
from slimserve.serve.choice import ChoiceDelta, ChoiceText
from slimserve.serve.log import RequestRow
from slimserve.serve.router import Job
from slimserve.serve.state import Place, ServerState


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request; every prompt counts once, whatever n is."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class Generation:
    """Runs the choices of one request; `num_choices` (n) consecutive submissions share one prompt."""

    def __init__(
        self,
        state: ServerState,
        row: RequestRow,
        place: Place,
        submissions: Sequence[Submit],
        *,
        num_choices: int,
        stops: Sequence[str],
        chat: bool,
    ) -> None:
        self._row = row
        self._place = place
        self._job = Job(state.router, submissions)
        self._choices = [
            ChoiceText(state.text, submission.prompt_token_ids, stops, chat=chat) for submission in submissions
        ]
        self._first_of_prompt = set(range(0, len(submissions), num_choices))
        self._unseen_prompts = set(self._first_of_prompt)
        self.usage = Usage(sum(len(submissions[index].prompt_token_ids) for index in self._first_of_prompt))
        row.num_prompt_tokens = self.usage.num_prompt_tokens

    async def start(self) -> None:
        """Hand everything to the engine; raises if it refuses."""
        await self._job.start()

    async def deltas(self, patience: float | None = None) -> AsyncGenerator[tuple[int, ChoiceDelta] | None, None]:
        """(choice, delta) pairs until every choice has ended; None after each `patience` seconds of silence."""
        async for item in self._job.outputs(patience):
            if item is None:
                yield None
                continue
            index, output = item
            if index in self._unseen_prompts:
                self._unseen_prompts.discard(index)
                self.usage.num_cached_tokens += output.num_cached_tokens
                self._row.num_cached_tokens = self.usage.num_cached_tokens
            delta = self._choices[index].feed(output)
            self._row.saw(index, len(delta.token_ids))
            self.usage.num_completion_tokens += len(delta.token_ids)
            if delta.stopped_here:
                self._job.end(index)
            yield index, delta

    def more_ready(self) -> bool:
        """Whether the next delta is there without waiting."""
        return self._job.more_ready

    def close(self) -> None:
        """Abort what has not ended and give the places back; idempotent."""
        self._job.close()
        self._place.leave()

"""The oracle: one process, one request, no transfer, no prefix cache. What a right answer is.

Same model, page layout, KV format and chunking as the cluster, so that a split answer must equal it exactly.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvstore.digest import Digester
from kvstore.guard import Guard
from kvstore.ids import draw_incarnation
from kvstore.layout import KvFormat
from kvstore.step import PageRun, PlanRow, StepPlan
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from model.attention.select import make_backend
from model.base import LanguageModel
from model.grammar import AnswerMatcher, Grammars
from model.runner import StepRunner
from model.sampler import SampledToken, SampleRow
from model.sampling import SamplingParams
from model.ticket import finish_reason

_OWNER = 1


class Oracle:
    """Answers prompts alone. Not for serving: it has no limits and no cache."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        page_tokens: int,
        kv_format: KvFormat,
        chunk_tokens: int = 256,
        attention: str = "auto",
        slots: int = 64,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: needed for answers that keep to a schema."""
        layout = model.layout(page_tokens, kv_format)
        engine = MemoryEngine(MemoryFabric(), "oracle")
        self._guard = Guard(
            layout, slots, engine, draw_incarnation(os.urandom), Digester(b"oracle" * 4, layout.slot_bytes)
        )
        backend = make_backend(attention, layout)
        backend.warm_up(layout)
        self._runner = StepRunner(model, backend, self._guard)
        self._chunk_tokens = chunk_tokens
        self._eos = model.info.eos_token_ids
        self._grammars = grammars

    def answer(self, token_ids: Sequence[int], sampling: SamplingParams) -> list[SampledToken]:
        """All tokens of the answer, the ending one included. Raises what the guard raises."""
        ids = list(token_ids)
        layout = self._guard.layout
        pages = PageRun(self._guard.allocate(_OWNER, layout.pages_for(len(ids) + sampling.max_tokens)))
        out: list[SampledToken] = []
        try:
            done = 0
            while True:
                take = min(self._chunk_tokens, len(ids) - done)
                end = done + take
                last = end == len(ids)
                row = PlanRow(_OWNER, tuple(ids[done:end]), done, PageRun(pages.refs[: layout.pages_for(end)]), last)
                # A new matcher for each token: what may come follows from the tokens alone.
                matcher = self._matcher(sampling, ids[len(ids) - len(out) :]) if last else None
                sample_row = SampleRow(sampling, end, len(out), self._eos, ids, matcher)
                [result] = self._runner.run(StepPlan(1, (row,)), {_OWNER: sample_row} if last else {})
                if result.error is not None:
                    raise result.error
                done = end
                if not last:
                    continue
                assert result.output is not None, "the last chunk wants logits"
                out.append(result.output)
                ids.append(result.output.token_id)
                if finish_reason(result.output.token_id, len(out), sampling, self._eos) is not None:
                    return out
        finally:
            self._guard.retire(pages.refs, _OWNER)

    def _matcher(self, sampling: SamplingParams, generated: Sequence[int]) -> AnswerMatcher | None:
        if not sampling.json_schema:
            return None
        assert self._grammars is not None, "an oracle of schemas has grammars"
        return self._grammars.start(sampling.json_schema, generated)

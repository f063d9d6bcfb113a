"""Drafts in a step: who gets one, within which limits, and the books of what became of it."""

from __future__ import annotations

from octavo.runner.api import SeqWork
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.drafts import Drafter
from octavo.scheduler.residents import Residents
from octavo.types import Sequence


class Speculation:
    """Adds drafts to the decodes of a plan that is otherwise made. They are optional: they take only tokens and memory
    that nobody asked for in this step."""

    def __init__(self, config: SchedulerConfig, residents: Residents) -> None:
        self._config = config
        self._residents = residents
        self._drafter = Drafter(config.speculative_tokens)

    def extend(self, work: dict[int, SeqWork]) -> None:
        """Give drafts to decodes, in order, while the step stays small enough."""
        config = self._config
        decodes = [w for w in work.values() if w.count == 1]
        room = config.speculative_limit - len(decodes)
        if room > 0:
            room = min(room, config.max_num_batched_tokens - sum(w.count for w in work.values()))
        for seq, start, _, samples, _ in decodes:
            if room <= 0:
                return
            most = min(room, seq.ceiling - len(seq.tokens) - 1)  # one token is drawn behind the draft
            if most <= 0 or samples != (seq,):
                continue
            draft = self._drafter.propose(seq, most)
            if draft and (slots := self._residents.look_ahead(seq, len(draft))):
                work[seq.id] = SeqWork(seq, start, 1 + slots, samples, draft[:slots])
                room -= slots

    def judged(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """The step has shown that `accepted` of `drafted` tokens were right."""
        totals = self._residents.totals
        totals.drafted += drafted
        totals.drafts_accepted += accepted
        seq.drafted += drafted
        seq.drafts_accepted += accepted
        self._drafter.learn(seq, drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._drafter.forget(seq)

    @property
    def at_rest(self) -> bool:
        """Nothing is remembered of anyone."""
        return self._drafter.at_rest

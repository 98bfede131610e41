"""One of 32 requests that run at once is damaged at each place where damage is looked for: that one ends, with the
reason of that check, and the 31 beside it in the same batch are right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.selftest.lab import THIEF, Subject, load_subject
from kvstore.ids import PageRef
from kvstore.layout import HEADER_BYTES
from kvstore.step import StepArrays
from kvstore.transfer.faults import BitFlip, TransferFaults
from tests.support.edge_lab import EdgeLab, Hooks, Seen, require_served

MANY = 32
ANSWER = {"max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


class OneVictim(Hooks):
    """Of the victim's pulls, and a place just before a step's exit check."""

    before_exit: Callable[[], None] = staticmethod(lambda: None)

    def decode_tuning(self, checks, model):
        tuning = super().decode_tuning(checks, model)
        return replace(tuning, step=replace(tuning.step, before_exit=lambda _plan: self.before_exit()))

    def _pull(self, start, orders) -> None:
        self._pulling.victim = start.ticket.token_ids == self.victim
        super()._pull(start, orders)


class ManyLab(EdgeLab):
    """Decode waits until all requests have joined or ended: then they step together."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject, **{"workers.max_running": MANY, "workers.max_waiting": 2 * MANY,
                                     "cache.decode_pages": 300, "cache.prefill_pages": 300})  # fmt: skip
        self.hooks = self.inject = OneVictim()
        self.prompts = [subject.prompt(f"one of many {i}", 70) for i in range(MANY)]
        self.victim = self.prompts[MANY // 2]
        self.hooks.victim = self.victim
        self.stolen: list[PageRef] = []
        self.freed = False
        self.hooks.before_decode_plan = self.together

    def together(self) -> bool:
        engine = self.decode.engine
        joined = sum(bool((r := engine.core.request(no)) and r.joined) for no in list(engine._live))
        return joined + sum(engine.facts().outcomes.values()) >= MANY

    def pages(self) -> tuple[int, tuple[PageRef, ...]]:
        """Of the victim, when its answer has begun."""
        number, pages = self.decode_pages(self.victim)
        return (number, pages) if len(pages) > 5 else (0, ())

    def take(self, which: int) -> None:
        """Gives one of the victim's pages away, with other bytes in it; once."""
        number, pages = self.pages()
        if number and not self.stolen:
            self.stolen.append(self.steal(pages[which], number, pages[2]))

    def free(self) -> None:
        """Gives the victim's open page back; once. While a step may write it, nobody else gets it."""
        number, pages = self.pages()
        if number and not self.freed:
            self.freed = True
            self.decode.guard.retire(pages[-1:], number)

    def during(self, act: Callable[[], None]) -> None:
        """Inside a step: after the entry check, before the first layer."""

        def wrapped(_plan, kv):
            def acting(layer, query, streams, scale):
                if layer == 0:
                    act()
                return kv(layer, query, streams, scale)

            return acting

        self.hooks.wrap_kv = wrapped

    def mixed_rows(self) -> None:
        """The victim's row of a step gets the pages and the tags of another row."""
        done: list[bool] = []

        def mix(arrays: StepArrays) -> None:
            number, _ = self.pages()
            numbers = arrays.request_no_B.tolist()
            if number in numbers and not done:
                done.append(True)
                mine, other = numbers.index(number), (numbers.index(number) + 1) % len(numbers)
                for array in (arrays.page_ids_BP, arrays.expected_BP2):
                    array[mine] = array[other]

        self.hooks.on_arrays = mix

    def source_moves_on(self) -> None:
        """Prefill gives the victim's pages up when their bytes have landed, before their tags are read."""
        engine = self.prefill_engine

        def give_up() -> None:
            for seq in list(engine.core._promised.values()):
                if seq.ticket.token_ids == self.victim:
                    engine.core.cancel(seq.request_no)
            engine.core.evict_all()

        self.hooks.after_landing = lambda _slots, _ids: self.from_thread(lambda: engine.loop.call(give_up))

    def altered(self, change: Callable[[object], None]) -> None:
        def event(start, message):
            if start.ticket.token_ids == self.victim and message.WhichOneof("event") == "page":
                change(message.page)
            return [message]

        self.hooks.each_event = event


def flip(offset: int) -> Callable[[ManyLab], None]:
    return lambda lab: setattr(lab.hooks, "faults", TransferFaults(bit_flips=(BitFlip(0, offset, 3),)))


def between_steps(lab: ManyLab) -> None:
    lab.hooks.before_decode_plan = lambda: lab.together() and (lab.take(0) or True)


PLACES: dict[str, tuple[Callable[[ManyLab], None], str]] = {
    "descriptor": (lambda lab: lab.altered(lambda page: setattr(page, "prefix_key", b"x" * 32)), "foreign_prefix_key"),
    "place": (lambda lab: lab.altered(lambda page: setattr(page, "first_position", 1024)), "page_misplaced"),
    "bounds": (lambda lab: lab.altered(lambda page: setattr(page, "page_id", 4096)), "page_out_of_bounds"),
    "header": (flip(48), "header_mismatch"),
    "digest": (flip(HEADER_BYTES + 70), "digest_mismatch"),
    "source tag": (lambda lab: lab.source_moves_on(), "source_moved_on"),
    "entry": (between_steps, "stale_at_entry"),
    "rows": (lambda lab: lab.mixed_rows(), "rows_disagree"),
    "write": (lambda lab: lab.during(lab.free), "stale_write"),
    "kernel": (lambda lab: lab.during(lambda: lab.take(0)), "stale_in_kernel"),
    "exit": (lambda lab: setattr(lab.hooks, "before_exit", lambda: lab.take(0)), "stale_at_exit"),
}


@pytest.mark.parametrize("place", list(PLACES))
async def test_one_of_thirty_two_is_damaged_and_ends_alone(subject, place):
    damage, reason = PLACES[place]
    lab = ManyLab(subject)
    try:
        await lab.start()
        lives = [(w.guard.incarnation, w.facts().pid) for w in (lab.prefill, lab.decode)]
        damage(lab)
        seen: list[Seen] = await asyncio.gather(*(lab.see(prompt, **ANSWER) for prompt in lab.prompts))
        for one, prompt in zip(seen, lab.prompts, strict=True):
            wanted = [t.token_id for t in lab.wanted(prompt, **ANSWER)]
            if prompt is not lab.victim:
                assert one.error is None
                assert one.tokens() == wanted
                continue
            assert one.error is not None
            assert one.error.reason == reason
            assert one.tokens() == wanted[: len(one.tokens())]
        outcomes = lab.decode.engine.facts().outcomes
        assert outcomes == {"ok": MANY - 1, reason: 1}
        assert [(w.guard.incarnation, w.facts().pid) for w in (lab.prefill, lab.decode)] == lives
        await lab.decode.engine.loop.call(lambda: lab.decode.guard.retire(lab.stolen, THIEF))
        for name in ("on_arrays", "wrap_kv", "each_event", "after_landing", "before_decode_plan"):
            setattr(lab.hooks, name, None)
        lab.hooks.victim = ()
        await lab.require_quiet()
        await require_served(lab)
    finally:
        await lab.stop()

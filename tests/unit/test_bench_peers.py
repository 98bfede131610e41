"""How the answers of the side-by-side comparison are judged and summed up."""

from __future__ import annotations

import pytest

from bench.faults.page import SYSTEMS
from bench.peers.cases import ANSWER_TOKENS, CASES, Outcome, Verdict, judge, marked, summarise
from bench.peers.genlock_cases import IN_PROCESS, SIGNALS, SYSTEM, MarkedSubject
from cluster.selftest.lab import Reply
from kvstore.errors import Unavailable

ENDS = (0, 2)


class Model:
    """What a subject asks of a model here."""

    class info:  # an attribute of the model
        eos_token_ids = ENDS


class Subject(MarkedSubject):
    """Whose right answer is given."""

    def __init__(self, right: tuple[int, ...] = ()) -> None:
        super().__init__("marked", Model(), None, ANSWER_TOKENS, neighbour_tokens=64)  # type: ignore[arg-type] # not run
        self._right = right

    def answer(self, prompt, max_tokens):
        class Answer:
            tokens = self._right[:max_tokens]

        return Answer()


def outcome(case: str, verdict: Verdict, told: str = "OK", system: str = SYSTEM, served: bool = True) -> Outcome:
    return Outcome(system, case, 0, told, verdict, served, 1.0)


def test_a_marker_is_a_names_own_and_the_same_every_time():
    assert marked("victim") == marked("victim")
    names = [marked(name) for name in ("victim", "foreign", "neighbour", "filler", "other")]
    assert len({(m.city, m.number) for m in names}) == len(names)
    for one in names:
        assert one.in_text(one.text)
        assert not any(other.in_text(one.text) for other in names if other is not one), "none holds another's"


def test_an_answer_is_right_foreign_or_wrong():
    foreign, other = marked("foreign"), marked("other")
    right = f" {marked('victim').city} and its number is {marked('victim').number}."
    assert judge(right, right, [foreign]) is Verdict.RIGHT
    assert judge(f" {foreign.city}", right, [other, foreign]) is Verdict.FOREIGN
    assert judge(f" {foreign.number}", right, [foreign]) is Verdict.FOREIGN, "half of the secret is enough"
    assert judge(" a city", right, [foreign, other]) is Verdict.WRONG
    assert judge(right[:-1], right, [foreign]) is Verdict.WRONG, "the beginning alone is not the answer"
    assert judge(f" {foreign.city}", f" {foreign.city}", [foreign]) is Verdict.RIGHT, (
        "what the model says without a fault"
    )


def test_repetitions_of_a_case_are_one_line_in_the_order_of_the_cases():
    lines = summarise(
        [
            outcome("out-of-range", Verdict.REFUSED, "DATA_LOSS/page_out_of_bounds"),
            outcome("healthy", Verdict.RIGHT),
            outcome("healthy", Verdict.RIGHT, system="vLLM P/D"),
            outcome("out-of-range", Verdict.REFUSED, "DATA_LOSS/page_out_of_bounds"),
        ]
    )
    assert [(line.case, line.system) for line in lines] == [
        ("healthy", SYSTEM), ("healthy", "vLLM P/D"), ("out-of-range", SYSTEM)
    ]  # fmt: skip
    assert lines[0].verdict == "right"
    assert (lines[2].told, lines[2].verdict) == ("DATA_LOSS/page_out_of_bounds", "an error, no wrong token, 2 of 2")


def test_one_bad_repetition_is_not_hidden_by_good_ones():
    trials = [
        outcome("other-live", Verdict.RIGHT), outcome("other-live", Verdict.FOREIGN),
        outcome("other-live", Verdict.REFUSED, "INTERNAL/x", served=False),
    ]  # fmt: skip
    (line,) = summarise(trials)
    assert line.verdict == "right, 1 of 3; another prompt's secret, 1 of 3; an error, no wrong token, 1 of 3"
    assert line.told == "OK, INTERNAL/x"
    assert not line.others_served


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ((), ()), ((5, 6), (5, 6)), ((5, 0, 7), (5, 0)), ((5, 2, 0), (5, 2)), ((0,), (0,)), ([5, 6, 2, 8], [5, 6, 2]),
    ],
)  # fmt: skip
def test_an_answer_counts_up_to_its_first_end_of_sequence(tokens, wanted):
    assert Subject()._upto_end(tokens) == wanted


def test_a_neighbour_is_right_up_to_its_end_and_never_with_an_error():
    subject = Subject((5, 6, 0, 9, 9))
    assert subject.right((), Reply((5, 6, 0, 8, 8), None)), "after its end a model is made to say what it may"
    assert subject.right((), Reply((5, 6), None)), "so far"
    assert not subject.right((), Reply((5, 7, 0, 9, 9), None))
    assert not subject.right((), Reply((5, 0, 0, 9, 9), None)), "it ended too early"
    assert not subject.right((), Reply((5, 6, 0), Unavailable("gone", "gone")))


def test_every_case_is_made_here_and_the_page_knows_the_system():
    assert {case.name for case in CASES} == IN_PROCESS.keys() | SIGNALS.keys()
    assert SYSTEM in SYSTEMS

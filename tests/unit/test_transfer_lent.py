"""What is lent to calls is gone when none has it, and not before."""

from __future__ import annotations

import threading

import pytest

from kvstore.transfer.lent import Lent

WAIT_S = 20


class Thing:
    """Tells when its destructor runs."""

    def __init__(self, on_end: threading.Event) -> None:
        self._on_end = on_end

    def __del__(self) -> None:
        self._on_end.set()


def hanging(lent: Lent) -> tuple[threading.Thread, threading.Event]:
    """A call that has the object until the event is set."""
    begun, let_go = threading.Event(), threading.Event()

    def use(_thing: Thing) -> None:
        begun.set()
        assert let_go.wait(WAIT_S)

    thread = threading.Thread(target=lent.call, args=(use,))
    thread.start()
    assert begun.wait(WAIT_S)
    return thread, let_go


def test_a_call_gets_the_object_and_after_the_end_none_does() -> None:
    ended = threading.Event()
    lent = Lent(Thing(ended))
    assert lent.call(type) is Thing
    assert not lent.gone
    seen: list[bool] = []
    assert lent.take_down(WAIT_S * 1000, lambda thing: seen.append(lent.gone or ended.is_set()))
    assert seen == [False]
    assert ended.is_set()
    assert lent.gone
    assert lent.call(lambda thing: 1) is None
    assert lent.take_down(0, lambda thing: seen.append(True))
    assert seen == [False], "there is nothing to end a second time"


def test_the_end_waits_for_calls_and_takes_no_new_ones() -> None:
    ended = threading.Event()
    lent = Lent(Thing(ended))
    thread, let_go = hanging(lent)
    results: list[bool] = []
    ender = threading.Thread(target=lambda: results.append(lent.take_down(WAIT_S * 1000, lambda thing: None)))
    ender.start()
    while lent.call(lambda thing: 1) is not None:
        pass
    assert not ended.is_set()
    assert not lent.gone
    let_go.set()
    for one in (thread, ender):
        one.join(WAIT_S)
    assert results == [True]
    assert ended.is_set()
    assert lent.gone


def test_a_call_that_hangs_keeps_the_object_and_says_so() -> None:
    ended = threading.Event()
    lent = Lent(Thing(ended))
    thread, let_go = hanging(lent)
    last: list[object] = []
    assert not lent.take_down(10, last.append)
    assert last == []
    assert not ended.is_set()
    assert not lent.gone
    let_go.set()
    thread.join(WAIT_S)
    assert ended.is_set()
    assert lent.gone


def test_a_call_that_raises_has_given_the_object_back() -> None:
    lent = Lent(Thing(threading.Event()))

    def bad(_thing: Thing) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        lent.call(bad)
    assert lent.take_down(0, lambda thing: None)
    assert lent.gone

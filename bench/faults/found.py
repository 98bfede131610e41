"""Faults of our own that were found on the way, by the simulator, chaos and the fuzzers, and are no more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """One fault. `by`: what found it. `shown` and `control` name proofs as `Fault` does; a fault without a control says
    in `no_control` why there is none."""

    title: str
    by: str
    was: str
    now: str
    shown: tuple[str, ...]
    control: tuple[str, ...] = ()
    no_control: str = ""


_CONVERT = "tests/unit/test_convert.py::"
_PREFILL_SAYS = "tests/integration/test_edges_ends.py::test_what_prefill_says_is_never_the_callers_mistake"
_NOT_IN_SUITE = "the suite does not run without it"

FOUND: tuple[Found, ...] = (
    Found("A page leaks from the prefix cache", "simulator, seed 1,008,810 of then; now seed 1,008,938 shows it",
          "A page that went took the entry of its key out of the index, although the key named its successor by then; the "
          "successor was in no table any more, and never freed.",
          "An entry is forgotten with its page and never with another one of the same key.",
          ("tests/sim/test_sim_pinned.py::test_pinned",
           "tests/unit/test_kv_tables.py::test_a_full_index_takes_nothing_until_something_leaves_or_is_stale"),
          ("tests/sim/test_sim_pinned.py::test_control_a_page_that_goes_takes_its_successors_entry_along",)),
    Found("Rot in a cached page's header ends prefill's turn", "simulator, seed 5",
          "A header in the prefix cache that no longer parsed raised inside the step, for all requests of it.",
          "It is a miss.",
          ("tests/sim/test_sim_pinned.py::test_pinned",
           "tests/unit/test_prefill_core.py::test_a_page_whose_header_rotted_in_the_cache_is_a_miss"),
          no_control="the seed is the record; the code that it ran against is gone"),
    Found("A stream that is cut during its first message", "chaos, seed 11",
          "A request that was cut while its first message was being written got no status; its client hung until its own "
          "deadline.",
          "The headers of a stream go first (`wire/replies.py`), so that a status always follows.",
          ("tests/unit/test_replies.py::test_a_cut_stream_gets_its_status",),
          ("tests/unit/test_replies.py::test_control_without_headers_first_a_caller_waits_for_ever",)),
    Found("A peer that is stopped holds its callers for a minute", "SIGSTOP of a worker",
          "grpc waits a minute for the answer to a ping, whatever the keepalive time-out says: requests to a stopped peer "
          "hung for 60 s and more.",
          "Both limits are set, on both sides of a connection; the calls end after seconds.",
          ("tests/integration/test_stopped_peer.py::test_a_stream_of_a_stopped_peer_ends",
           "tests/integration/test_stopped_peer.py::test_a_stream_to_a_stopped_caller_ends",
           "tests/integration/test_stopped_peer.py::test_the_options_agree"),
          no_control="it would take grpc's minute"),
    Found("A connection that broke stays broken", "simulator",
          "A transfer connection between two live workers that broke was used again and again; the pair served nothing "
          "until one of them was restarted.",
          "A read that failed by itself forgets the connection, and the next handoff makes another.",
          ("tests/unit/test_peers.py::test_a_connection_that_broke_is_made_anew_while_both_live", "sim connection_lost"),
          ("tests/sim/test_sim_pinned.py::test_control_a_connection_that_broke_and_is_kept_is_noticed",)),
    Found("A first token outside the vocabulary", "fuzzer, events from prefill",
          "Prefill's first token was passed on to the client as it came.",
          "It is checked at the border, with its log-probabilities.",
          (f"{_CONVERT}test_a_first_token_that_no_model_sampled_is_refused", _PREFILL_SAYS), no_control=_NOT_IN_SUITE),
    Found("A time that is no number", "fuzzer, events from prefill",
          "A duration that is NaN broke the join of a request, which then stayed for ever.",
          "Durations are checked at the border: finite, not negative, within a bound.",
          (f"{_CONVERT}test_a_duration_that_no_clock_shows_is_refused", _PREFILL_SAYS), no_control=_NOT_IN_SUITE),
    Found("A malformed answer of prefill", "fuzzer, events from prefill",
          "It was told to the client as the client's own bad input.",
          "It is prefill's failure: `UNAVAILABLE/prefill_malformed`.",
          (_PREFILL_SAYS, "tests/integration/test_edges_ends.py::"
           "test_a_prefill_that_breaks_the_protocol_ends_that_request_alone"), no_control=_NOT_IN_SUITE),
    Found("An address of a pool that is nested deeply", "fuzzer, pool addresses",
          "It raised an untyped error in the reader.",
          "Every address that cannot be is refused as `bad_address`.",
          ("tests/contract/test_transfer_contract.py::test_connect_refuses_a_bad_address",), no_control=_NOT_IN_SUITE),
    Found("A number of a session that is used again", "review, then the fuzzer, commands of a session",
          "What a worker told late of a request that had been cancelled went to the next one that its caller gave the same "
          "number, with the first one's end.",
          "What is told is bound to the request, a number that was used is refused, and a gateway never uses one again.",
          ("tests/unit/test_session.py::test_what_comes_late_of_a_request_reaches_nobody_that_has_its_number",
           "tests/unit/test_session.py::test_a_number_of_a_request_that_has_ended_is_refused",
           "tests/unit/test_gateway_sessions.py::test_numbers_of_a_session_never_come_again_and_lie_apart"),
          ("tests/fuzz/test_fuzz.py::test_the_fuzzer_of_sessions_finds_what_comes_under_a_number_that_is_anothers",)),
)  # fmt: skip

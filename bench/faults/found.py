"""Faults of our own that were found on the way, by the simulator, chaos, fuzzers and reviews, and are no more."""

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
    Found("Whatever end a decode worker tells is believed", "review",
          "An answer of three tokens that the worker called whole at a hundred, one without a reason, and a million tokens of "
          "five were passed on as clean ends.",
          "How an answer ends follows from its tokens and from what was asked; the gateway goes through the rule again.",
          ("tests/integration/test_gateway_lies.py::test_a_lie_ends_its_request_and_no_other",
           "tests/integration/test_gateway_lies.py::"
           "test_an_answer_that_does_not_stop_at_max_tokens_is_ended_at_the_worker_too"),
          ("tests/integration/test_gateway_lies.py::test_control_with_the_judge_off_the_lie_is_what_the_client_gets",)),
    Found("One connection holds up every stream", "review",
          "A stranger's HTTP body in chunks of a byte was parsed to its end after the 401: other streams stood still for "
          "half a minute. A stranger's gRPC messages were read and built before anybody asked who calls.",
          "Connections are parsed in slices and closed once answered; callers are asked for before their message is read.",
          ("tests/integration/test_openai_intake.py::test_who_was_refused_is_not_parsed_any_more",
           "tests/integration/test_openai_intake.py::test_the_parser_gets_slices_and_the_loop_turns_between",
           "tests/integration/test_gateway_strangers.py::test_a_stranger_is_refused_without_its_message"),
          no_control=_NOT_IN_SUITE),
    Found("One tenant's texts and schemas hold up all others'", "review",
          "Tokenizing and the check of JSON schemas were first come, first served: a hundred long texts or four callers with "
          "costly schemas kept other tenants waiting for half a minute.",
          "Both take turns by tenant, with a bound for each.",
          ("tests/unit/test_gateway_pool.py::test_tenants_take_turns_however_many_one_has_waiting",
           "tests/contract/test_gateway_schemas.py::test_tenants_take_turns"), no_control=_NOT_IN_SUITE),
    Found("A killed helper condemns a schema", "review",
          "The process that checks schemas, killed from outside, made an innocent schema refused for all tenants, and that "
          "was remembered.",
          "Only the ends that its own limits bring say that a schema is too costly; any other is asked again.",
          ("tests/contract/test_gateway_schemas.py::test_a_process_that_others_end_says_nothing_of_the_schema",),
          no_control=_NOT_IN_SUITE),
    Found("A loop that ends for good, and nobody hears", "review",
          "One malformed answer of an identity provider ended the reading of its keys until the gateway's restart.",
          "Loops go on after whatever a turn raises, counted and told once; a task that is no such loop is listed.",
          ("tests/unit/test_loops.py::test_keys_of_a_provider_are_read_again_after_any_answer",
           "tests/unit/test_loops.py::test_every_task_is_a_loop_that_goes_on_or_ends_with_what_it_is_for"),
          no_control=_NOT_IN_SUITE),
    Found("What tenants wrote in an operator's view", "review",
          "The message of a refused request, which may quote a schema, a role or a model's name, was kept for operators.",
          "They are told reason, field and meaning, never the message.",
          ("tests/integration/test_privacy_of_errors.py::test_what_a_refusal_quotes_goes_to_its_caller_alone",),
          no_control=_NOT_IN_SUITE),
    Found("A refill undoes what an operator was told", "review",
          "After a flush of the registry the controller could write back an older number of workers than one that it had "
          "acknowledged meanwhile.",
          "What is refilled is decided from the newest state, by a rule that was tried in every order.",
          ("tests/unit/test_wanted.py::test_what_was_told_stays_wanted_in_every_order_of_a_look_a_change_and_flushes",),
          ("tests/unit/test_wanted.py::test_control_without_one_half_of_the_rule_some_order_undoes_a_change",)),
    Found("A cluster file that grows while it is read", "review",
          "365 characters of YAML with aliases took a controller 46 s and a gigabyte; `010` meant 8, and of a key that came "
          "twice the last one counted.",
          "YAML that people write is read without aliases, twice-named keys and numbers with two meanings, within limits.",
          ("tests/unit/test_yaml_doors.py::test_a_bomb_costs_the_cluster_no_more_than_its_characters",
           "tests/unit/test_strict_yaml.py::test_any_text_is_a_plain_value_or_one_typed_error"), no_control=_NOT_IN_SUITE),
    Found("A drain's door that shuts too early", "a scale-down under heavy load",
          "A request that was on its way to a decode worker for longer than its door stays open failed as `draining`.",
          "What a door turns away goes to another pair of workers; nothing was spent on it.",
          ("tests/integration/test_drain.py::test_what_a_closed_door_turns_away_is_served_by_another_worker",),
          ("tests/sim/test_sim_fleet.py::test_what_a_closed_door_turns_away_goes_to_another_pair",)),
    Found("An owner of pages dies with its reader's connection", "a test that failed now and then",
          "Over TCP UCX ends the process whose memory is being read when the reader's engine closes in the middle of it.",
          "An engine that closes waits for its reads, at most two seconds. A reader that is killed cannot.",
          ("tests/contract/test_transfer_nixl_peers.py::test_a_reader_that_leaves_waits_for_what_it_has_under_way",
           "tests/contract/test_transfer_nixl_peers.py::test_a_reader_that_leaves_does_not_wait_for_a_peer_that_stands_still"),
          no_control="the library ends the process"),
    Found("A failure that no counter has", "the fault table's own counts",
          "A worker's counter of requests left out all that failed as `unknown_handoff`.",
          "Each of the five ways to a wrong 200 counts one failure, by its cause.",
          ("tests/integration/test_fault_table.py::test_row",), no_control=_NOT_IN_SUITE),
    Found("A clock that jumps back in the middle of a prefill", "chaos, then the simulator's own checks",
          "Prefill told that its work had taken less than no time, decode refused the message, and a right answer was lost.",
          "What is told as a duration is never negative, whatever the clock did between its ends.",
          ("tests/unit/test_clock_back.py::test_prefills_durations_are_none_that_decode_refuses",
           "tests/unit/test_clock_back.py::test_decodes_queue_is_none_that_a_gateway_refuses", "sim clock_jump"),
          no_control=_NOT_IN_SUITE),
)  # fmt: skip

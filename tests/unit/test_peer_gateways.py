"""What several gateways know, put together: who is asked, what is shown, who is named."""

from __future__ import annotations

import pytest

from cluster.gateway.operator import merged_lists, one_described
from cluster.gateway.peers import MAX_ASKED, peer_host, to_ask, unreached
from cluster.registry.codec import decode_gateway, encode_gateway
from cluster.registry.records import GatewayRecord
from cluster.registry.rules import MAX_NAME_CHARS, check_gateway
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import InvalidInput, NotFound, Unavailable


def test_every_other_gateway_is_asked_and_who_cannot_be_is_named():
    records = [GatewayRecord("me", endpoint="a:1"), GatewayRecord("old"), GatewayRecord("b", endpoint="b:1")]
    endpoints, left = to_ask(records, "me")
    assert endpoints == ["b:1"]
    assert [(one.gateway, one.reason) for one in left] == [("old", "no_endpoint")]


def test_so_many_are_asked_and_no_more():
    endpoints, left = to_ask([GatewayRecord(f"{n}", endpoint=f"h{n}:1") for n in range(MAX_ASKED + 2)], "me")
    assert len(endpoints) == MAX_ASKED
    assert [one.reason for one in left] == ["too_many_gateways"] * 2


def listed(*ages_ms: int, total: int = 0, gateway: str = "g") -> pb.ListRequestsResponse:
    requests = [pb.RunningRequest(server_id=f"{gateway}{age}", age_ms=age, gateway=gateway) for age in ages_ms]
    return pb.ListRequestsResponse(requests=requests, total=total or len(requests))


def test_the_oldest_of_all_gateways_are_shown_and_all_are_counted():
    missing = unreached("c:1", "deadline_exceeded", "x" * 1000)
    told = merged_lists((listed(9, 5, 1, gateway="a"), listed(7, 3, total=40, gateway="b")), (missing,), 3)
    assert [one.server_id for one in told.requests] == ["a9", "b7", "a5"]
    assert told.total == 43
    assert [one.gateway for one in told.unreached] == ["c:1"]
    assert len(told.unreached[0].detail) <= 256


def described(name: str, outcome: str = "", age_ms: int = 1) -> pb.DescribeRequestResponse:
    return pb.DescribeRequestResponse(request=pb.RunningRequest(server_id=name, age_ms=age_ms), outcome=outcome)


def test_a_request_that_runs_goes_before_one_that_has_ended():
    found = [described("old", "ok", 9), described("now"), described("late", "ok", 3)]
    assert one_described("x", found, ()).request.server_id == "now"
    assert one_described("x", [found[0], found[2]], ()).request.server_id == "late"


def test_a_label_of_two_gateways_is_none_of_both():
    with pytest.raises(NotFound) as caught:
        one_described("x", [described("a"), described("b")], ())
    assert caught.value.reason == "ambiguous_request"


def test_what_nobody_knows_is_not_found_only_where_everybody_answered():
    with pytest.raises(NotFound):
        one_described("x", (), ())
    with pytest.raises(Unavailable) as caught:
        one_described("x", (), [unreached("c:1", "peer_unreachable", "refused")])
    assert caught.value.reason == "gateways_unreached"
    assert "c:1 (peer_unreachable)" in caught.value.message


@pytest.mark.parametrize(
    ("host", "own", "wanted"),
    [("10.0.0.3", "", "10.0.0.3"), ("gw.local", "", "gw.local"), ("0.0.0.0", "10.0.0.9", "10.0.0.9")],
)
def test_where_others_reach_a_gateway(host: str, own: str, wanted: str):
    assert peer_host(host, own) == wanted


def test_a_wildcard_is_no_address_to_tell():
    assert peer_host("0.0.0.0", "") not in ("0.0.0.0", "::")
    assert peer_host("::", "") not in ("0.0.0.0", "::")


def test_an_endpoint_is_kept_bounded_and_may_be_missing():
    record = GatewayRecord("g", 3, 1, "h:1")
    assert decode_gateway(encode_gateway(record)) == record
    assert decode_gateway('{"v":1,"gateway_id":"g","arrived":3,"waiting":1}') == GatewayRecord("g", 3, 1)
    with pytest.raises(InvalidInput) as caught:
        check_gateway(GatewayRecord("g", endpoint="h" * (MAX_NAME_CHARS + 1)))
    assert caught.value.field == "endpoint"

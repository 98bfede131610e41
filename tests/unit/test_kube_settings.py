"""Settings of the controller on Kubernetes, and what a pod without an account is told."""

from __future__ import annotations

import pytest

from cluster.config import load
from cluster.kube.client import KubeClient, refusal
from cluster.settings import KubeConfig
from kvstore.errors import Conflict, DeadlineExceeded, InvalidInput, NotFound, PermissionDenied, Unavailable


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("server", "http://10.0.0.1:6443"),
        ("server", "https://"),
        ("server", "https://kubernetes.default.svc/path"),
        ("cluster", "Genlock"),
        ("cluster", "a/../b"),
        ("namespace", "a b"),
        ("decode_group", ""),
        ("decode_per_pod", 0),
    ],
)
def test_bad_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=f"kube.{key}"):
        load(flags={f"kube.{key}": value})


def test_a_start_must_be_able_to_outlast_the_wait_for_its_pod() -> None:
    flags = {"kube.enabled": True, "kube.node_timeout_ms": 180_000, "workers.start_timeout_ms": 180_000}
    with pytest.raises(InvalidInput, match=r"workers\.start_timeout_ms"):
        load(flags=flags)
    assert load(flags={**flags, "workers.start_timeout_ms": 180_001}).config.kube.enabled
    assert not load(flags={**flags, "kube.enabled": False}).config.kube.enabled


def test_without_an_account_it_says_which_file(tmp_path) -> None:
    with pytest.raises(InvalidInput, match=r"kube\.account_folder") as raised:
        KubeClient(KubeConfig(account_folder=str(tmp_path)))
    assert raised.value.reason == "no_service_account"


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (401, PermissionDenied, "kube_denied"),
        (403, PermissionDenied, "kube_denied"),
        (404, NotFound, "kube_not_found"),
        (409, Conflict, "kube_conflict"),
        (422, Conflict, "kube_conflict"),
        (429, Unavailable, "kube_unreachable"),
        (500, Unavailable, "kube_unreachable"),
        (504, DeadlineExceeded, "kube_timeout"),
        (302, Unavailable, "kube_refused"),
    ],
)
def test_each_refusal_has_its_type_and_the_servers_words(status, kind, reason) -> None:
    error = refusal("GET /x", status, {"message": "because " * 100})
    assert (type(error), error.reason) == (kind, reason)
    assert "because" in error.message
    assert len(error.message) < 500
    assert str(status) in refusal("GET /x", status, None).message

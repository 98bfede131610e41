"""The controller's actor on a Ray cluster: made where it is missing, replaced where its settings are others, watched.

Blocking calls to Ray; nothing here decides anything about workers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from types import MappingProxyType
from typing import Any

from cluster.control.actor import ACTOR_NAME, ControllerActor, Pulse
from cluster.launch.controlling import check_alone, make_ray_service
from cluster.launch.ray_session import RaySession, first_line
from cluster.launch.spec import WorkerBuilder
from cluster.settings import Config
from kvstore.errors import Unavailable

CALL_S = 10.0
STOP_S = 15.0
POLL_S = 0.2
# Ray nodes whose pods have the account that may patch the RayCluster; any number of actors fits.
ACCOUNT = MappingProxyType({"controller": 0.001})


class RayController:
    """Raises InvalidInput where the settings cannot be those of a controller on its own."""

    def __init__(self, config: Config, builder: WorkerBuilder, tenants: str = "") -> None:
        check_alone(config)
        self._config = config
        self._builder = builder
        self._tenants = tenants
        self._session = RaySession(config.control.ray_address, config.control.ray_namespace)
        self._actor: Any = None
        self._asked: Any = None
        text = f"{config!r} {tenants} {builder!r}"
        self.label = hashlib.sha256(text.encode()).hexdigest()[:16]

    def open(self) -> None:
        """Raises Unavailable where there is no such Ray cluster."""
        self._session.open(cpus=0.0, host="", resources={})

    def close(self) -> None:
        """Leaves actor and workers."""
        self._session.close()

    def ensure(self) -> bool:
        """Makes the actor where there is none with these settings. True where it made one. Workers go on meanwhile.
        Raises Unavailable."""
        actor = self.find()
        if actor is not None:
            self._actor = actor
            if self.pulse().label == self.label:
                return False
            self.stop()
        ray = self._session.ray
        make = functools.partial(make_ray_service, self._config, self._builder, self._tenants)
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                self._actor = (
                    ray.remote(ControllerActor)
                    .options(
                        name=ACTOR_NAME,
                        namespace=self._session.namespace,
                        lifetime="detached",
                        max_restarts=-1,
                        # Its methods only read: asking again after a restart is right.
                        max_task_retries=-1,
                        num_cpus=0,
                        resources=dict(ACCOUNT) if self._config.kube.enabled else None,
                    )
                    .remote(make, self.label)
                )
            except ValueError as exc:  # Ray gives a name back a little after its actor's end
                if time.monotonic() >= deadline:
                    raise Unavailable("name_taken", f"another controller is being started: {first_line(exc)}") from exc
                time.sleep(POLL_S)
            else:
                return True

    def find(self) -> Any:
        """The actor, or None."""
        try:
            return self._session.ray.get_actor(ACTOR_NAME, namespace=self._session.namespace)
        except ValueError:
            return None

    def pulse(self, timeout_s: float = CALL_S) -> Pulse:
        """Raises Unavailable (`controller_silent`) while it is restarted or Ray is away."""
        ray = self._session.ray
        # One question at a time: Ray asks it again by itself after each restart, for as long as that takes.
        self._asked = self._asked if self._asked is not None else self._actor.pulse.remote()
        try:
            pulse: Pulse = ray.get(self._asked, timeout=timeout_s)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as exc:
            if not isinstance(exc, ray.exceptions.GetTimeoutError):
                self._asked = None
            raise Unavailable(
                "controller_silent", f"the controller's actor does not answer: {first_line(exc)}"
            ) from exc
        self._asked = None
        return pulse

    def wait_serving(self, timeout_s: float) -> Pulse:
        """Raises Unavailable that says what keeps it."""
        deadline = time.monotonic() + timeout_s
        why = "starting"
        while time.monotonic() < deadline:
            try:
                pulse = self.pulse(max(0.1, min(CALL_S, deadline - time.monotonic())))
            except Unavailable as error:
                why = error.message
            else:
                if pulse.endpoint:
                    return pulse
                why = pulse.error
            time.sleep(POLL_S)
        raise Unavailable("controller_not_serving", f"the controller does not serve within {timeout_s:g} s: {why}")

    def stop(self) -> None:
        """Ends the actor for good; workers go on as they are."""
        ray = self._session.ray
        actor = self._actor if self._actor is not None else self.find()
        if actor is None:
            return
        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):  # else without ceremony
            ray.get(actor.stop.remote(), timeout=STOP_S)
        ray.kill(actor, no_restart=True)
        self._actor = self._asked = None

"""One thread that works for many tenants, who take turns: one piece of work each, however many they bring."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TenantTurns:
    """Safe from any thread. The thread starts with the first piece of work. Bounded by its users: a piece of work for
    each request that a worker has taken."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        # In the order of their turns; only the line of the one under way may be empty.
        self._lines: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """What `work` returns or raises. Work whose future was cancelled before its turn is not done. Raises
        RuntimeError after `close`."""
        future: Future[T] = Future()
        with self._lock:
            self._pool.submit(self._one)  # waits for this lock
            self._lines.setdefault(tenant, deque()).append((future, work))
        return future

    def close(self) -> None:
        """Does not wait for the work under way; the rest is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [future for line in self._lines.values() for future, _work in line]
        for future in waiting:
            future.cancel()

    def _one(self) -> None:
        """As often as there is work: whose turn it is when there is time for it, not who came when."""
        with self._lock:
            tenant, line = next(iter(self._lines.items()))
            future, work = line.popleft()
        try:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        finally:
            with self._lock:
                # Only now: a tenant that came meanwhile is next.
                if line:
                    self._lines.move_to_end(tenant)
                else:
                    del self._lines[tenant]

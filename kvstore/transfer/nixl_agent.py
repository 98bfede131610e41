"""One agent of the NIXL library with its UCX backend: what the nixl engine calls, and nothing else of the library.

The library is optional and loaded late; `missing()` tells why it cannot be used. Its bindings are loaded without the
Python package around them: that package reconfigures the process's logging (closing handlers that others opened) and
fixes the progress thread to busy polling.

What shapes this file (measured with nixl-cu12 1.5.1):

- With a progress delay of 0, the library's default, an idle agent burns a core: 0.97 of it against 0.002 with 10 ms.
  Network events wake the thread all the same; the delay bounds only what an event missed by UCX can cost.
- Without thread synchronisation, several threads on one agent crash the process. STRICT makes each call exclusive.
- Releasing a request that runs ends our interest, not its writes: 65 MB landed afterwards. Requests are therefore
  released after their end only, or just before the agent is destroyed.
- A request that ended with REMOTE_DISCONNECT has ended for good: the endpoint is closed, and UCX drops what still
  comes for its requests. So have the other requests of that endpoint. Any other error proves nothing.
- Over TCP the peer's own UCX answers a read, and takes an endpoint that closes under its answer for fatal ("unexpected
  error: Endpoint timeout"): the peer's process aborts. On a busy host 5 of 17 owners died of readers that closed with
  16 MiB under way, and 0 of 30 since reads that are under way are waited for before an agent is destroyed.
- UCX listens on every network device that it may use, and may use all: which ones is a list, of which `engine_config`
  takes the first alone, so they too go by the environment.
- Transports are chosen per agent (`engine_config`), but log levels and modules only by environment variables, which
  the library reads when it is loaded and when the first backend is made. They are set for just that long, and only
  where the operator has not set them. UCX's InfiniBand module is left out where the host has no such device: beside
  the system's own libibverbs it brings a second libnl into the process, which then crashes at exit.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from kvstore.errors import TransferError, TransferTimeout, Unavailable
from kvstore.transfer.common import U8
from kvstore.transfer.lent import Lent

Rows = list[tuple[int, int, int]]  # (address, bytes, 0 for host memory)

PACKAGES = ("nixl_cu12", "nixl_cu13")
TRANSPORTS = ("auto", "tcp")
PROGRESS_DELAY_US = 10_000
BACKEND = "UCX"
SEE_OFF_S = 2.0  # a peer that has stopped costs a closing engine so much
SEE_OFF_POLL_S = 0.002
DEVICES_VARIABLE = "UCX_NET_DEVICES"
_INFINIBAND = Path("/sys/class/infiniband")
# A lock and no state: the environment belongs to the whole process, so two agents must not set it at once.
_ENVIRONMENT_LOCK = threading.Lock()


class ReadState(Enum):
    """How far a request is.

    REFUSED: it was never posted. GONE: it has ended, because the peer's endpoint closed. FAILED: bytes may still land.
    """

    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    GONE = "gone"
    FAILED = "failed"


@contextlib.contextmanager
def _environment(devices: str = "") -> Iterator[None]:
    """Quiet logs, fitting modules and, where some are given, network devices while the library is loaded and while it
    makes its backend; failures reach the caller as errors."""
    wanted = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_VFS_ENABLE": "n"}
    if devices:
        wanted[DEVICES_VARIABLE] = devices
    if not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
        wanted["UCX_MODULES"] = "^ib"
    with _ENVIRONMENT_LOCK:
        ours = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)


def load_library() -> Any:
    """The bindings module. Raises ImportError, or OSError for a missing shared library."""
    for package in PACKAGES:
        name = f"{package}._bindings"
        if name in sys.modules:
            return sys.modules[name]
        found = importlib.util.find_spec(package)
        if found is None:
            continue
        spec = importlib.machinery.PathFinder.find_spec(name, list(found.submodule_search_locations or ()))
        if spec is None or spec.loader is None:
            raise ImportError(f"{package} holds no bindings")
        with _environment():
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return sys.modules.setdefault(name, module)
    raise ImportError("none of the packages " + ", ".join(PACKAGES) + " is installed")


def missing() -> str | None:
    """None when the library loads, else the reason why not."""
    try:
        load_library()
    except (ImportError, OSError) as error:
        return f"nixl cannot be loaded: {error}"
    return None


class Agent:
    """`transport` auto takes what UCX finds fastest (CMA on one host, RDMA where there is some), tcp only TCP.
    `devices`: the network devices that it may use and listen on, with commas between; empty: all.

    Every method may be called from several threads. Raises Unavailable (library_missing, library_failed).
    """

    def __init__(self, name: str, transport: str = "auto", devices: str = "") -> None:
        try:
            library = load_library()
        except (ImportError, OSError) as error:
            raise Unavailable("library_missing", f"the nixl library cannot be loaded: {error}") from error
        self.name = name
        self._library = library
        self._gone: tuple[type[Exception], ...] = (library.nixlRemoteDisconnectError, library.nixlNotFoundError)
        self._errors: tuple[type[Exception], ...] = tuple(
            kind for kind in vars(library).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        # Also what the C++ behind the library throws.
        self._refusals: tuple[type[Exception], ...] = (*self._errors, RuntimeError, ValueError)
        config = library.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_DELAY_US
        config.useListenThread, config.captureTelemetry = False, False
        config.syncMode = library.NIXL_THREAD_SYNC_STRICT
        try:
            with _environment(devices):
                agent = library.nixlAgent(name, config)
                agent.createBackend(BACKEND, {} if transport == "auto" else {"engine_config": f"TLS={transport}"})
        except self._refusals as error:
            raise Unavailable("library_failed", f"the nixl library cannot start: {error!r}") from error
        self._agent = Lent(agent)
        self._handles: set[int] = set()
        self._lock = threading.Lock()
        # After the agent, so that memory outlives it even when an engine is dropped without `close`.
        self._regions: dict[int, tuple[U8, Any]] = {}

    @property
    def stopped(self) -> bool:
        """True once the library's agent is gone and nothing can land any more."""
        return self._agent.gone

    def register(self, region: U8) -> None:
        """Makes memory usable by reads. Raises TransferError."""
        listed = self._library.nixlRegDList(self._library.DRAM_SEG, [(region.ctypes.data, region.size, 0, "")])
        with self._lock:  # before the call: one that breaks in an unknown way may have registered
            self._regions[region.ctypes.data] = (region, listed)
        try:
            done = self._agent.call(lambda agent: agent.registerMem(listed, []))
        except self._errors as error:
            with self._lock:
                self._regions.pop(region.ctypes.data, None)
            raise TransferError("register_failed", f"the nixl library cannot register memory: {error!r}") from error
        if done is None:
            with self._lock:
                self._regions.pop(region.ctypes.data, None)
            raise TransferError("engine_closed", "the engine is closed")

    def deregister(self, region: U8) -> None:
        with self._lock:
            known = self._regions.pop(region.ctypes.data, None)
        if known is not None:
            with contextlib.suppress(*self._errors):
                self._agent.call(lambda agent: agent.deregisterMem(known[1], []))

    @property
    def regions(self) -> int:
        """How many are registered now."""
        with self._lock:
            return len(self._regions)

    def metadata(self) -> bytes:
        """What a peer loads to reach the regions registered so far."""
        return self._agent.call(lambda agent: bytes(agent.getLocalMD())) or b""

    def load(self, metadata: bytes) -> str:
        """Loads a peer; returns its agent's name. Raises Unavailable (peer_gone)."""
        try:
            name = self._agent.call(lambda agent: bytes(agent.loadRemoteMD(metadata)))
        except self._refusals as error:
            raise Unavailable("peer_gone", f"the peer's nixl metadata cannot be loaded: {error!r}") from error
        return (name or b"").decode(errors="replace")

    def forget(self, name: str) -> None:
        """Unloads a peer. No read of its may be running."""
        with contextlib.suppress(*self._errors):
            self._agent.call(lambda agent: agent.invalidateRemoteMD(name))

    def post(self, name: str, local_rows: Rows, remote_rows: Rows) -> tuple[int, ReadState]:
        """Starts reading rows from a loaded peer; returns a handle for `poll`, and the state.

        Over CMA all bytes are copied in here. A state other than RUNNING is final and needs no `poll`.
        """
        library = self._library
        local = library.nixlXferDList(library.DRAM_SEG, local_rows)
        remote = library.nixlXferDList(library.DRAM_SEG, remote_rows)
        try:
            handle = self._agent.call(lambda agent: agent.createXferReq(library.NIXL_READ, local, remote, name, "", []))
        except self._errors:
            return 0, ReadState.REFUSED  # memory that the peer has not registered, or a peer the library has forgotten
        if handle is None:
            return 0, ReadState.FAILED
        with self._lock:
            self._handles.add(handle)
        return handle, self._state(handle, lambda agent: agent.postXferReq(handle))

    def poll(self, handle: int) -> ReadState:
        """The state of a read that was RUNNING. DONE and GONE release the handle."""
        return self._state(handle, lambda agent: agent.getXferStatus(handle))

    def _state(self, handle: int, ask: Callable[[Any], Any]) -> ReadState:
        try:
            status = self._agent.call(ask)
        except self._gone:
            state = ReadState.GONE
        except self._errors:
            return ReadState.FAILED  # the handle stays until `destroy`
        else:
            if status is None:
                return ReadState.FAILED
            if status == self._library.NIXL_IN_PROG:
                return ReadState.RUNNING
            state = ReadState.DONE
        with self._lock:
            self._handles.discard(handle)
        with contextlib.suppress(*self._errors):
            self._agent.call(lambda agent: agent.releaseXferReq(handle))
        return state

    def _see_off(self, agent: Any, handles: set[int]) -> None:
        """Waits until no read is under way, at most SEE_OFF_S: nobody else has the agent any more."""
        deadline_s = time.monotonic() + SEE_OFF_S
        under_way = set(handles)
        while under_way and time.monotonic() < deadline_s:
            under_way = {handle for handle in under_way if self._runs(agent, handle)}
            if under_way:
                time.sleep(SEE_OFF_POLL_S)

    def _runs(self, agent: Any, handle: int) -> bool:
        try:
            return bool(agent.getXferStatus(handle) == self._library.NIXL_IN_PROG)
        except self._errors:
            return False

    def destroy(self, timeout_ms: int) -> None:
        """Ends the agent once its reads have ended, or after SEE_OFF_S whatever runs. Raises TransferTimeout if a call
        of the library does not return."""
        if not self._agent.take_down(timeout_ms, self._let_go):
            raise TransferTimeout("close_timeout", f"a call of nixl has not returned within {timeout_ms} ms")
        with self._lock:  # only now: until here the library may still write to that memory
            self._regions.clear()

    def _let_go(self, agent: Any) -> None:
        with self._lock:
            handles, regions = self._handles, list(self._regions.values())
            self._handles = set()
        self._see_off(agent, handles)
        for handle in handles:
            with contextlib.suppress(*self._errors):
                agent.releaseXferReq(handle)
        for _, listed in regions:
            with contextlib.suppress(*self._errors):
                agent.deregisterMem(listed, [])

"""A failure reaches the caller as an error, and nobody as a line of the library's: logs are the operator's."""

import pytest

from tests.contract.nixl_kit import in_a_process
from tests.contract.transfer_kit import require

FAILURES = """
from kvstore.errors import GenlockError
from kvstore.transfer.base import PagePair
from kvstore.transfer.select import make_engine
pools = [make_engine("{engine}") for _ in range(2)]
exports = [(e.allocate(8, 192), e.publish(1, "layout"))[1] for e in pools]
peer = pools[0].connect(exports[1])
pools[1].close()
print(pools[0].read_pages(peer, [PagePair(0, 0)]).wait(5000).value)
try:
    pools[0].connect(exports[1])
except GenlockError as error:
    print(error.reason)
pools[0].close()
"""


@pytest.mark.parametrize("engine", ["shm", "mooncake", "nixl"])
def test_failures_are_quiet(engine: str) -> None:
    require(engine)
    done = in_a_process(FAILURES.format(engine=engine))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["failed", "peer_gone"], "")

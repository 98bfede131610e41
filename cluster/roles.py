"""The two kinds of workers, and how many of them there may be."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


# Most workers of one role that may be wanted: by settings, operators, policies and the chart.
MAX_WORKERS = 256
# Most in one fleet at a time: as many above the wanted ones may surge while these drain.
MAX_FLEET = 2 * len(Role) * MAX_WORKERS

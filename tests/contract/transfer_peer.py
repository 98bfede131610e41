"""A pool in a process of its own, driven over stdin. Run by test_transfer_contract.py.

    python transfer_peer.py ENGINE SLOTS SLOT_BYTES INCARNATION SEED

Prints the export as one JSON line, then obeys: `tag PAGE GENERATION`, `close`; answers each with `ok`.
"""

import json
import sys
from dataclasses import asdict

import numpy as np

from kvstore.transfer.common import slots_of, tags_of
from kvstore.transfer.select import make_engine


def main(name: str, slots: int, slot_bytes: int, incarnation: int, seed: int) -> None:
    engine = make_engine(name)
    buffer = engine.allocate(slots, slot_bytes)
    slots_of(buffer, slots, slot_bytes)[:] = np.random.default_rng(seed).integers(
        0, 256, (slots, slot_bytes), dtype=np.uint8
    )
    print(json.dumps(asdict(engine.publish(incarnation, "layout"))), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["tag", page, generation]:
                tags_of(buffer, slots)[int(page), 1] = int(generation)
            case ["close"]:
                engine.close()
        print("ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(text) for text in sys.argv[2:]))

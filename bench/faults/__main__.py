"""`python -m bench.faults`."""

import sys

from bench.faults.cli import command

sys.exit(command.main(standalone_mode=False))

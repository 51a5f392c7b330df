"""`slime-like inspect`, from a checkout that is not installed: python scripts/inspect_checkpoint.py
..."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_like.cli.__main__ import until_closed
from slime_like.cli.inspect_checkpoint import main

if __name__ == "__main__":
    raise SystemExit(until_closed(main))

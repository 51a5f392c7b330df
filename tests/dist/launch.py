"""`run_ranks` is that of the parity matrix: see scripts/parity/ranks.py."""

from scripts.parity.ranks import run_ranks as run_ranks

"""`slime-like convert megatron-to-hf`, from a checkout that is not installed: python
scripts/convert_megatron_to_hf.py ..."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_like.cli.convert_megatron_to_hf import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`slime-like convert hf-to-megatron`, from a checkout that is not installed: python
scripts/convert_hf_to_megatron.py ..."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_like.cli.convert_hf_to_megatron import main

if __name__ == "__main__":
    raise SystemExit(main())

"""slime-like reward-server FOLDER: serve a reward model with transformers, on a GPU if there is
one.

`POST /classify {"input_ids": [...]}` answers as SGLang does, `{"embedding": [score]}`, with the
score of the last token; `/tokenize` and `/health` as its own. Requests that wait are computed
together.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_like.errors import RunError
from slime_like.extras import pip_install

DTYPES = ("float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="slime-like reward-server",
        description="Serve a reward model, for --rm-type reward_model --rm-url http://HOST:PORT.",
    )
    result.add_argument("folder", type=Path, help="the model, as --save-hf writes it")
    result.add_argument("--host", default="127.0.0.1", help="address to listen on")
    result.add_argument("--port", type=int, default=30010, help="port to listen on")
    result.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU")
    result.add_argument(
        "--batch-tokens", type=int, default=16384, help="most tokens of a batch, with padding"
    )
    return result


def main() -> int:
    arguments = parser().parse_args()
    import torch

    from slime_like.reward_server.model import RewardModel

    try:
        import uvicorn

        from slime_like.reward_server.app import make_app
    except ImportError:
        raise SystemExit(f"error: needs fastapi and uvicorn: {pip_install('agents')}") from None
    cuda = torch.cuda.is_available()
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if cuda else "float32"))
    try:
        model = RewardModel(arguments.folder, dtype, torch.device("cuda" if cuda else "cpu"))
    except RunError as error:
        raise SystemExit(f"error: {error}") from None
    app = make_app(model, arguments.batch_tokens)
    print(
        f"reward model {arguments.folder} at http://{arguments.host}:{arguments.port}", flush=True
    )
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Images on real servers: each server makes pixels and features itself, and computes what the
trainer computes; updates bring the weights of the tower, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from scripts.make_tiny_model import PATCH_TOWER, family_of, make_tiny_model
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.images.encoded import EncodedImage
from slime_like.images.processor import ImageProcessor
from slime_like.servers.processes import ServerProcess, free_ports
from slime_like.sglang.protocol import Legal, generation_body, read_generation
from tests.e2e.programs import Done, TrainServer
from tests.sglang.conftest import Servers, give_own_weights, server_launch, wait_for
from tests.sglang.test_real_servers import EXACT, command_line, rows
from tests.vision import picture, processor_of, turned

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_end_tokens=True)
# Both sides compute in float32. Measured: at most 1e-6.
LIMIT = 1e-5
# one that nobody resizes; two that are resized, of which one is lossy; one that a camera turned
IMAGES = [
    EncodedImage(picture(0, 16, 24)),
    EncodedImage(picture(1, 37, 50, "JPEG")),
    EncodedImage(picture(2, 45, 21)),
    turned(),
]
# SGLang takes patches of another size for features that were computed before
PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "window_size": 28}
PROMPTS = [("abc", [0]), ("xy", [1, 2]), ("no picture", []), ("z", [3, 2]), ("abc", [0])]


class Seen:
    """A model's folder, and what the local engine answers to prompts with pictures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor: ImageProcessor = processor_of(folder, self.tokenizer)
        self.requests = [self._request(i, *prompt) for i, prompt in enumerate(PROMPTS)]

    def _request(self, number: int, text: str, which: list[int]) -> GenerateRequest:
        content = [*({"type": "image"} for _ in which), {"type": "text", "text": text}]
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        written = self.processor.written(rendered)
        ids = self.tokenizer(written, add_special_tokens=False)["input_ids"]
        images = tuple(IMAGES[i] for i in which)
        tokens = self.processor.expand(ids, self.processor.token_counts(images))
        return GenerateRequest(number, tuple(tokens), number, images)

    def expected(self) -> list[GenerateOutput]:
        engine = LocalEngine(str(self.folder), self.tokenizer, images=self.processor)
        engine.update_weights(iter(load_file(self.folder / "model.safetensors").items()), 1)
        return engine.generate(self.requests, GREEDY)

    def served(self, url: str) -> list[GenerateOutput]:
        outputs = []
        for request in self.requests:
            rid = f"seen-{request.sample_id}"
            body = generation_body(request, GREEDY, rid, self.processor)
            answer = httpx.post(f"{url}/generate", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            vocabulary = self.tokenizer.vocab_size + len(self.tokenizer.added_tokens_decoder)
            legal = Legal(vocabulary, {1})
            outputs.append(read_generation(answer.content, request, GREEDY, rid, legal))
            if request.images:
                assert answer.json()["prompt_token_ids"] == list(request.prompt_tokens)
        return outputs

    def check(self, url: str) -> None:
        for served, own in zip(self.served(url), self.expected(), strict=True):
            assert served.tokens == own.tokens
            assert served.log_probs == pytest.approx(own.log_probs, abs=LIMIT, rel=0)


def test_answers_about_pictures_are_the_trainers(seeing: Path, seeing_servers: Servers) -> None:
    """Directly and through a router; a second time from caches; with the weights of an update."""
    seen = Seen(seeing / "model")
    give_own_weights(seeing_servers, seeing / "model", "1")
    for url in [*seeing_servers.urls, *seeing_servers.urls]:
        seen.check(url)


@contextlib.contextmanager
def one_server(model: Path, log: Path, **more: Any) -> Iterator[str]:
    """The address of one that runs. more: of `server_launch`."""
    (port,) = free_ports(1)
    process = ServerProcess(server_launch(model, port, log, **more))
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"127.0.0.1:{port}"
    finally:
        process.end()


def test_another_tower(tmp_path: Path) -> None:
    tower = {**family_of("Qwen2.5-VL").tiny["vision_config"], **PATCH_TOWER, **PATCHES}
    make_tiny_model("Qwen2.5-VL", tmp_path / "model", images=True, vision_config=tower)
    with one_server(tmp_path / "model", tmp_path / "server.log", weight_version="1") as address:
        Seen(tmp_path / "model").check(f"http://{address}")


def test_routes_of_prompts_with_pictures_come_back(
    seeing: Path, programs: TrainServer, tmp_path: Path
) -> None:
    """A mixture of experts: of the features of images, too, the trainer's routers choose what the
    server's chose, and follow them where an update would have them choose otherwise."""
    # SGLang takes further features of three layers, whatever the file says
    tower = {**family_of("Qwen3-VL-30B-A3B").tiny["vision_config"], **PATCH_TOWER}
    tower |= {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
    make_tiny_model(
        "Qwen3-VL-30B-A3B", tmp_path / "model", images=True, mlp_only_layers=[], vision_config=tower
    )
    (tmp_path / "rows.jsonl").write_text((seeing / "rows.jsonl").read_text())
    for path in seeing.glob("*.png"):
        (tmp_path / path.name).symlink_to(path)
    out = tmp_path / "out"
    with one_server(
        tmp_path / "model", tmp_path / "server.log", weight_version="1", enable_return_routed_experts=True
    ) as address:  # fmt: skip
        Seen(tmp_path / "model").check(f"http://{address}")
        line = seeing_run(
            tmp_path, ["--rollout-external-engine-addrs", address, "--no-sglang-router"], out, "--expert-model-parallel-size", "2",
            "--use-rollout-routing-replay", "--moe-router-dtype", "fp32", "--num-steps-per-rollout", "2",
        )  # fmt: skip
        done = programs.train(line, tmp_path / "run", ranks=2, timeout_s=300)
    found = agree(done, out)
    assert all(row["rollout/moe_routing_disagreement"] == 0 for row in found)
    assert any(row["train/moe_replay_disagreement"] > 0 for row in found)


def seeing_run(seeing: Path, engines: list[str], out: Path, *more: str) -> list[str]:
    """Three rollouts of which the third asks about the first one's pictures."""
    return command_line(
        seeing, engines, out, "--prompt-data", str(seeing / "rows.jsonl"), "--micro-batch-size", "8",
        "--multimodal-keys", '{"image":"images"}', "--max-train-rollout-diff", str(EXACT), *more,
    )  # fmt: skip


def agree(done: Done, out: Path) -> list[dict[str, Any]]:
    done.ok()
    found = rows(out)
    assert [row["rollout/weight_version_min"] for row in found] == [1, 2, 3]
    assert max(row["rollout/train_rollout_log_prob_diff_max"] for row in found) < EXACT
    assert all(row["rollout/failed_frac"] == 0 for row in found)
    assert found[0]["train/grad_norm"] > 0  # so that the second weights are others
    return found


@pytest.mark.parametrize("transport", ["broadcast", "disk", "tensor"])
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_run_with_pictures(
    seeing: Path,
    seeing_servers: Servers,
    programs: TrainServer,
    tmp_path: Path,
    transport: str,
    tower: str,
) -> None:
    """Through a router, from two tensor-parallel ranks. After each update of the weights servers
    and trainer agree on every token, also about pictures that the servers have seen before."""
    give_own_weights(seeing_servers, seeing / "model")
    more = ["--train-vision-tower"] if tower == "trained" else []
    line = seeing_run(
        seeing, seeing_servers.flags, tmp_path / "out", "--tensor-model-parallel-size", "2", "--update-weight-transport", transport,
        "--check-weight-update-equal", *more,
    )  # fmt: skip
    done = programs.train(line, tmp_path / "run", ranks=2, timeout_s=300)
    agree(done, tmp_path / "out")
    assert ("SGLANG_VLM_CACHE_SIZE_MB=0" in done.out + done.err) == (tower == "trained")


def test_features_of_older_weights_are_caught(
    seeing: Path, programs: TrainServer, tmp_path: Path
) -> None:
    """The negative control: a server that keeps features of images through updates."""
    with one_server(seeing / "model", tmp_path / "server.log") as address:
        engine = ["--rollout-external-engine-addrs", address, "--no-sglang-router"]
        line = seeing_run(
            seeing, engine, tmp_path / "out", "--train-vision-tower", "--train-rollout-diff-patience", "1"
        )  # fmt: skip
        done = programs.train(line, tmp_path / "run", ranks=1, timeout_s=300)
    assert "trainer and sampler disagree in log-prob" in done.error()
    assert len(rows(tmp_path / "out")) == 2

"""States of the prompts in the files that a server writes, one for each forward pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.sglang.tensor_dump import (
    FOLDER_SETTING,
    IDS,
    LENGTHS,
    dump_files,
    dumped_states,
)
from tests.fake_sglang import (
    FakeServer,
    Handler,
    engine_of,
    fake_servers,
    make_served_model,
    status,
)

FIRST = torch.tensor([5, 6, 7, 8])
SECOND = torch.tensor([9, 5])


def write_pass(folder: Path, number: int, prompts: list[Tensor], **more: Any) -> None:
    """A pass over these prompts: every module gives its tokens, times a number of its own."""
    ids = torch.cat(prompts)
    rows = ids[:, None].float()
    dumped = {
        "model.embed_tokens": rows,
        "model.layers.0.input_layernorm": 2 * rows,
        "model.layers.0.self_attn.rotary_emb": [rows, rows],
        "model.layers.0.self_attn.o_proj": 3 * rows,
        "model.layers.0.post_attention_layernorm": [4 * rows, 5 * rows],
        "model.layers.0.mlp.down_proj": 6 * rows,
        "model.layers.1.input_layernorm": [7 * rows, 8 * rows],
        "model.norm": [9 * rows, 10 * rows],
        IDS: ids,
        LENGTHS: torch.tensor([prompt.numel() for prompt in prompts]),
        **more,
    }
    folder.mkdir(exist_ok=True)
    torch.save(dumped, folder / f"Pass{number:05d}.pt")


def test_prompts_of_one_pass_and_of_several(tmp_path: Path) -> None:
    rank = tmp_path / "TP0_PP0_Rank0_pid1"
    write_pass(rank, 0, [torch.tensor([0])])  # a health check
    old = dump_files(tmp_path)
    write_pass(rank, 1, [SECOND, FIRST])
    new = dump_files(tmp_path) - old
    assert len(new) == 1
    together = dumped_states(new, [FIRST, SECOND])
    expected = torch.cat([FIRST, SECOND])[:, None].float()
    factors = {
        **{"embedding": 1, "layers.0.norm": 2, "layers.0.attention": 3, "layers.0.mlp_norm": 4},
        **{"layers.0.mlp": 6, "layers.1.norm": 7, "layers.0": 8, "norm": 9, "layers.1": 10},
    }
    assert together.keys() == factors.keys()
    for site, factor in factors.items():
        assert torch.equal(together[site], factor * expected), site
    write_pass(rank, 2, [FIRST])
    write_pass(rank, 3, [SECOND])
    apart = dumped_states(dump_files(tmp_path) - old - new, [FIRST, SECOND])
    assert all(torch.equal(apart[site], together[site]) for site in together)


def test_a_prompt_that_is_in_no_pass(tmp_path: Path) -> None:
    """As with a cached prefix: then nothing is known."""
    write_pass(tmp_path / "TP0_PP0_Rank0_pid1", 0, [FIRST[2:], SECOND])
    assert dumped_states(dump_files(tmp_path), [FIRST, SECOND]) == {}
    assert dumped_states([], [FIRST]) == {}


def test_ranks_of_tensor_parallelism_have_parts_of_outputs(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_pass(tmp_path / f"TP{rank}_PP0_Rank{rank}_pid{rank}", 0, [FIRST])
        path = tmp_path / f"TP{rank}_PP0_Rank{rank}_pid{rank}/Pass00000.pt"
        dumped = torch.load(path)
        dumped["model.layers.0.self_attn.o_proj"] *= 1 + 2 * rank  # 3 times and 9 times the tokens
        torch.save(dumped, path)
    files = dump_files(tmp_path)
    rows = FIRST[:, None].float()
    found = dumped_states(files, [FIRST])
    assert torch.equal(found["layers.0.attention"], 12 * rows), "the sum of both"
    assert torch.equal(found["layers.0.mlp"], 6 * rows), "both have the sum already"
    assert torch.equal(found["layers.0"], 8 * rows)
    # what the other rank has not written for these tokens is not known
    other = tmp_path / "TP1_PP0_Rank1_pid1"
    write_pass(other, 0, [SECOND])
    write_pass(other, 1, [FIRST])
    found = dumped_states(dump_files(tmp_path), [FIRST])
    assert {"layers.0.attention", "layers.0.mlp"}.isdisjoint(found)
    assert {"embedding", "layers.0", "layers.0.mlp_norm", "norm"} <= found.keys()


def test_routers(tmp_path: Path) -> None:
    """Weights and numbers of the chosen experts, and the logits of all."""
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.9, 0.1], [0.6, 0.4]])
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32)
    expected = [[0.25, 0, 0.75], [0, 0.5, 0.5], [0.9, 0.1, 0], [0, 0.4, 0.6]]
    name = "model.layers.0.mlp.topk"
    rank = tmp_path / "TP0_PP0_Rank0_pid1"
    write_pass(rank, 0, [FIRST], **{name: [weights, chosen, torch.zeros(4, 3)]})
    found = dumped_states(dump_files(tmp_path), [FIRST])
    assert torch.equal(found["layers.0.router"], torch.tensor(expected))
    assert "layers.0.router" not in dumped_states(dump_files(tmp_path), [FIRST], routes=False)
    # the last number stands for a shared expert
    write_pass(rank, 0, [FIRST], **{name: [weights, chosen, torch.zeros(4, 2)]})
    assert "layers.0.router" not in dumped_states(dump_files(tmp_path), [FIRST])


@pytest.mark.parametrize("spoil", ["empty", "cut", "words", "list"])
def test_a_broken_file_is_named(spoil: str, tmp_path: Path) -> None:
    """E.g. of a server that ended while it wrote it."""
    rank = tmp_path / "TP0_PP0_Rank0_pid1"
    write_pass(rank, 0, [FIRST])
    path = rank / "Pass00000.pt"
    whole = path.read_bytes()
    torch.save([FIRST], tmp_path / "list")
    broken = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "words": b"no tensors",
        "list": (tmp_path / "list").read_bytes(),
    }
    path.write_bytes(broken[spoil])
    with pytest.raises(ValueError, match=r"Pass00000\.pt cannot be read: \w"):
        dumped_states(dump_files(tmp_path), [FIRST])


def test_one_bad_server_ends_no_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of five servers, one gives no /server_info, one no answer to the certificate's tokens, one
    dumps nothing and one a broken file: each is told in a warning, and the fifth is compared."""
    model = make_served_model(tmp_path / "model", seed=0)
    with fake_servers(model, 5) as servers, engine_of(model, servers) as engine:
        for number, server in enumerate(servers[1:]):
            server.info[FOLDER_SETTING] = str(tmp_path / f"dumps{number}")
        servers[0].refused["/server_info"] = (503, "no")
        servers[1].probe_faults = [status(500)] * 20
        servers[3].answer = partial(dump, servers[3], b"no tensors")  # type: ignore[method-assign]
        servers[4].answer = partial(dump, servers[4], None)  # type: ignore[method-assign]
        found = engine.trace([FIRST, SECOND])
        assert [url for url, _ in found] == [servers[4].url]
        assert {"embedding", "norm"} <= found[0][1].keys()
        told = "\n".join(caplog.messages)
        assert f"{servers[0].url} is out: no answer before a certificate" in told
        assert f"{servers[1].url} is out: no answer after a weight update" in told
        assert f"the layers of {servers[2].url} are not compared" in told and "no pass" in told
        assert f"the layers of {servers[3].url} are not compared" in told
        assert "cannot be read" in told


def dump(server: FakeServer, content: bytes | None, handler: Handler, body: Any) -> None:
    """Answer as the server does and write a pass with the prompt; content: in place of it."""
    if handler.path == "/generate":
        rank = Path(server.info[FOLDER_SETTING]) / "TP0_PP0_Rank0_pid1"
        number = len(body["input_ids"])
        rank.parent.mkdir(exist_ok=True)
        write_pass(rank, number, [torch.tensor(body["input_ids"])])
        if content is not None:
            (rank / f"Pass{number:05d}.pt").write_bytes(content)
    FakeServer.answer(server, handler, body)

"""What loads from the source of a model loads from its export: the same tokens and chat templates,
whatever files the tokenizer is made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from scripts.make_tiny_model import make_tiny_model
from slime_like.checkpoints.lock import this_process
from slime_like.checkpoints.replacement import OWNER, new_folder, replace_folder
from slime_like.cli.tiny_model import make_tokenizer
from slime_like.tinker.sampler import is_tied
from slime_like.weights.hf_save import finish_folder, save_hf

CODE = '''
from transformers import PreTrainedTokenizer
from .spelling import read

class LineTokenizer(PreTrainedTokenizer):
    """One token a line of its file."""
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **kwargs):
        self.words = read(vocab_file)
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.words.index(token) if token in self.words else 0

    def _convert_id_to_token(self, index):
        return self.words[index]
'''


def own_code(folder: Path) -> None:
    """As Kimi-K2's: the vocabulary in tiktoken.model, the class named in tokenizer_config.json alone,
    and a second file that it imports."""
    (folder / "tiktoken.model").write_text("\n".join("abcdefg"))
    (folder / "tokenization_line.py").write_text(CODE)
    (folder / "spelling.py").write_text("def read(path):\n    return open(path).read().split()\n")
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_line.LineTokenizer", None]},
        "tokenizer_class": "LineTokenizer",
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def several_templates(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "x"}
    tokenizer.save_pretrained(folder)
    assert (folder / "additional_chat_templates").is_dir(), "what this test is about"


def vocabulary_and_merges(folder: Path) -> None:
    """As GPT-2's and Qwen2's older files, without tokenizer.json."""
    words = ["a", "b", "c", "ab", "abc", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def one_template_in_a_file(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{{ messages }}"
    tokenizer.save_pretrained(folder)
    assert (folder / "chat_template.jinja").is_file()


MAKERS = [own_code, several_templates, vocabulary_and_merges, one_template_in_a_file]


@pytest.fixture(autouse=True)
def modules_below_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies code of a folder into the home folder, and imports it from there."""
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)


def load(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_an_export_has_the_tokenizer_of_its_source(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    source, made, saved = (tmp_path / name for name in ("source", "made", "saved"))
    source.mkdir()
    made.mkdir()
    make(source)
    (source / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["X"]}))
    for name in ("model.safetensors", "pytorch_model.bin", "optimizer.pt", "notes.txt"):
        (source / name).write_text("large")
    finish_folder(made, source, dtype="float32")
    replace_folder(made, saved)
    wanted, found = load(source), load(saved)
    assert type(found).__name__ == type(wanted).__name__
    assert found.get_vocab() == wanted.get_vocab() and len(found) > 1
    assert found("abcabc")["input_ids"] == wanted("abcabc")["input_ids"]
    assert found.chat_template == wanted.chat_template
    assert not {p.name for p in saved.iterdir()} & {
        "optimizer.pt",
        "pytorch_model.bin",
        "notes.txt",
    }


def test_templates_of_the_export_are_there(tmp_path: Path) -> None:
    source, made = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    made.mkdir()
    several_templates(source)
    (source / "config.json").write_text("{}")
    finish_folder(made, source, dtype=None)
    replace_folder(made, tmp_path / "saved")
    found = load(tmp_path / "saved")
    assert isinstance(found, PreTrainedTokenizerFast)
    assert set(found.chat_template) == {"default", "tool_use", "rag"}


def test_an_output_layer_of_its_own_is_told_of_families_that_tie_by_default(tmp_path: Path) -> None:
    """Published files of Gemma have no tie_word_embeddings: transformers would drop the layer."""
    source = tmp_path / "source"
    make_tiny_model("Gemma3ForCausalLM", source)
    config = json.loads((source / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (source / "config.json").write_text(json.dumps(config))
    assert is_tied(str(source))
    made = tmp_path / "made"
    made.mkdir()
    finish_folder(made, source, dtype=None, untied_head=True)
    replace_folder(made, tmp_path / "saved")
    assert not is_tied(str(tmp_path / "saved"))
    assert AutoConfig.from_pretrained(tmp_path / "saved").tie_word_embeddings is False


def saved_config(source: Path, target: Path, config: object, **tensors: Tensor) -> dict[str, Any]:
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps(config))
    save_hf(str(target), iter(tensors.items()), str(source))
    found: dict[str, Any] = json.loads((target / "config.json").read_text())
    return found


def test_a_table_of_integers_does_not_make_a_folder_quantised(tmp_path: Path) -> None:
    config = {
        "architectures": ["X"],
        "dtype": "float32",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]},
    }
    names = {"w": torch.ones(2, 2, dtype=torch.bfloat16), "table": torch.ones(9, dtype=torch.int64)}
    found = saved_config(tmp_path / "source", tmp_path / "plain", config, **names)
    assert found == {"architectures": ["X"], "dtype": "bfloat16"}
    names = {
        "a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
        "table": torch.ones(9, dtype=torch.int64),
    }
    found = saved_config(tmp_path / "source", tmp_path / "quantised", config, **names)
    assert found == config


@pytest.mark.parametrize("task", ["ForTokenClassification", "ForSequenceClassification"])
@pytest.mark.parametrize(
    "source", ["ForCausalLM", "ForTokenClassification", "ForSequenceClassification"]
)
def test_a_value_head_has_its_class_whatever_the_source_is(
    tmp_path: Path, source: str, task: str
) -> None:
    """The one has a bias, which transformers drops silently when it reads the other."""
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [f"Qwen3{source}"]}))
    finish_folder(made, tmp_path, dtype="float32", value_task=task)
    config = json.loads((made / "config.json").read_text())
    assert config["architectures"] == [f"Qwen3{task}"]


def test_saving_after_kills_and_to_links(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "saved"
    config = {"architectures": ["X"]}
    (tmp_path / "elsewhere").mkdir()
    target.symlink_to(tmp_path / "elsewhere")
    work = new_folder(target).parent
    (work / OWNER).write_text(json.dumps({**this_process(), "start_ticks": 1}))
    assert saved_config(source, target, config, w=torch.ones(2))["dtype"] == "float32"
    assert target.is_symlink() and not work.exists()
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match="is a symbolic link to"):
        saved_config(source, target, config, w=torch.ones(2))

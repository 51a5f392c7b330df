"""Prompts: templates, lengths, order, position; evaluation sets; supervised samples."""

import dataclasses
import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arguments.eval_sets import EvalSet, command_line_sets
from arguments.schema.data import DataConfig, EvalConfig
from slime_like.data.prompts import PromptSource, load_eval_sets
from slime_like.data.sft import answer_problem, sft_samples
from slime_like.rewards.grader import Grader
from slime_like.rewards.registry import answer_check
from slime_like.types import Sample, SampleStatus

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking is defined and thinking %}[think]{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer):
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    other.chat_template = TEMPLATE
    return other


PINNED = [5, 0, 6, 4, 2, 7, 3, 1, 8, 9, 3, 1, 2, 9, 5, 0, 6, 8, 7, 4]  # epochs 0 and 1 of seed 42

GSM8K = [
    {"question": "Tom has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs $20,000. Two of them?", "answer": "2 * 20,000\n#### 40,000"},
    {"question": "It was 5 degrees and fell by 8. Now?", "answer": "5 - 8\n#### -3"},
]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def ten(tmp_path):
    rows = [
        {"input": f"prompt {i}" + "!" * i, "label": str(i), "metadata": {"number": i}}
        for i in range(10)
    ]
    return DataConfig(prompt_data=write_rows(tmp_path / "ten.jsonl", rows), label_key="label")


def numbers(prompts):
    return [prompt.metadata["number"] for prompt in prompts]


def test_gsm8k_shape(tmp_path, tokenizer):
    config = DataConfig(
        prompt_data=write_rows(tmp_path / "g.jsonl", GSM8K),
        input_key="question",
        label_key="answer",
    )
    source = PromptSource(config, tokenizer)
    prompts = source.next_prompts(3)
    assert len(source) == 3
    assert [p.text for p in prompts] == [row["question"] for row in GSM8K]
    assert [p.label for p in prompts] == [row["answer"] for row in GSM8K]
    assert tokenizer.decode(prompts[1].tokens) == GSM8K[1]["question"]
    assert [p.metadata for p in prompts] == [{}] * 3


def test_wrong_key_names_file_line_and_keys(tmp_path, tokenizer):
    path = write_rows(tmp_path / "g.jsonl", GSM8K)
    with pytest.raises(
        ValueError,
        match=r"g\.jsonl:1: missing key 'input' \(--input-key\); the row has: answer, question",
    ):
        PromptSource(DataConfig(prompt_data=path), tokenizer)
    with pytest.raises(ValueError, match=r"missing key 'reply' \(--label-key\)"):
        PromptSource(
            DataConfig(prompt_data=path, input_key="question", label_key="reply"), tokenizer
        )


def test_no_data_at_all(tokenizer):
    with pytest.raises(ValueError, match="--prompt-data is missing"):
        PromptSource(DataConfig(), tokenizer)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input": 3}, "must be a string or a list of messages with a role, not int"),
        ({"input": ""}, "is empty"),
        ({"input": []}, "must be a string or a list"),
        ({"input": [{"content": "x"}]}, "messages with a role"),
        (
            {"input": [{"role": "user", "content": "x"}]},
            "list of chat messages, which needs --apply-chat-template",
        ),
        (
            {"input": "x", "metadata": "text"},
            r"'metadata' \(--metadata-key\) must be an object, not str",
        ),
    ],
)
def test_rows_that_are_no_prompt(tmp_path, tokenizer, row, words):
    path = write_rows(tmp_path / "a.jsonl", [{"input": "fine"}, row])
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{words}"):
        PromptSource(DataConfig(prompt_data=path), tokenizer)
    assert len(PromptSource(DataConfig(prompt_data=path, skip_bad_rows=1), tokenizer)) == 1


def test_chat_template(tmp_path, chat_tokenizer):
    rows = [
        {"input": "hello"},
        {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    config = DataConfig(
        prompt_data=write_rows(tmp_path / "a.jsonl", rows), apply_chat_template=True
    )
    expected = ["<user>hello</user><assistant>", "<system>s</system><user>u</user><assistant>"]
    prompts = PromptSource(config, chat_tokenizer).next_prompts(2)
    assert [p.text for p in prompts] == expected
    assert [chat_tokenizer.decode(p.tokens) for p in prompts] == expected
    thinking = dataclasses.replace(config, apply_chat_template_kwargs={"thinking": True})
    assert (
        PromptSource(thinking, chat_tokenizer).next_prompts(1)[0].text
        == "<user>hello</user><assistant>[think]"
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({}, "'content' is missing or null"),
        ({"content": None, "tool_calls": None}, "'content' is missing or null"),
        ({"content": 3}, "'content' must be a string or a list of parts, not int"),
        ({"content": {"text": "x"}}, "'content' must be a string or a list of parts, not dict"),
        ({"content": []}, "'content' must be a string or a list of parts, not an empty list"),
        ({"content": ["x"]}, "every part of 'content' must be an object with a 'type'"),
        ({"content": [{"type": "image"}]}, "a part of type 'image' in 'content' is not offered"),
        ({"content": "x", "tool_calls": "f()"}, "'tool_calls' must be a list"),
        ({"content": "x", "tool_calls": [{}]}, r"tool_calls\[0\] must have a function with a name"),
        (
            {"content": [{"type": "text"}]},
            "a part of 'content' of type 'text' must hold a string under 'text'",
        ),
    ],
)
def test_messages_that_say_nothing(tmp_path, chat_tokenizer, message, words):
    system = {"role": "system", "content": "s"}
    path = write_rows(
        tmp_path / "a.jsonl", [{"input": "fine"}, {"input": [system, {"role": "user", **message}]}]
    )
    with pytest.raises(
        ValueError, match=rf"a\.jsonl:2: 'input' \(--input-key\): message 1 \(user\): {words}"
    ):
        PromptSource(DataConfig(prompt_data=path, apply_chat_template=True), chat_tokenizer)


def test_messages_of_parts_and_of_tool_calls(tmp_path, chat_tokenizer):
    """Parts are one text. This template writes no calls: they would be lost."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "u"}, {"text": "v"}]}]
    path = write_rows(tmp_path / "a.jsonl", [{"input": parts}])
    config = DataConfig(prompt_data=path, apply_chat_template=True)
    (prompt,) = PromptSource(config, chat_tokenizer).next_prompts(1)
    assert prompt.text == "<user>uv</user><assistant>"
    calls = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": ""},
    ]
    write_rows(tmp_path / "a.jsonl", [{"input": parts}, {"input": calls}])
    with pytest.raises(ValueError, match=r"a.jsonl:2: message 0 .* does not write the tool calls"):
        PromptSource(config, chat_tokenizer)


def test_tokenizer_without_a_template(ten, tokenizer):
    with pytest.raises(
        ValueError, match="--apply-chat-template: the tokenizer has no chat template"
    ):
        PromptSource(dataclasses.replace(ten, apply_chat_template=True), tokenizer)


def test_order_of_the_file_over_epochs(ten, tokenizer):
    source = PromptSource(ten, tokenizer)
    drawn = [source.next_prompts(4) for _ in range(6)]
    assert [n for prompts in drawn for n in numbers(prompts)] == [i % 10 for i in range(24)]
    assert [p.group_id for prompts in drawn for p in prompts] == list(range(24))
    assert source.epoch == 2


def test_more_prompts_at_once_than_an_epoch_holds(ten, tokenizer):
    assert numbers(PromptSource(ten, tokenizer).next_prompts(25)) == [i % 10 for i in range(25)]


def test_shuffle_depends_on_seed_and_epoch_alone(ten, tokenizer):
    config = dataclasses.replace(ten, rollout_shuffle=True)
    first, second = PromptSource(config, tokenizer), PromptSource(config, tokenizer)
    one, two = numbers(first.next_prompts(10)), numbers(first.next_prompts(10))
    assert one + two == [n for _ in range(5) for n in numbers(second.next_prompts(4))]
    assert sorted(one) == sorted(two) == list(range(10))
    assert one != two
    assert one != list(range(10))
    assert one != numbers(
        PromptSource(dataclasses.replace(config, rollout_seed=7), tokenizer).next_prompts(10)
    )
    assert (
        len(
            numbers(
                PromptSource(dataclasses.replace(config, rollout_seed=-1), tokenizer).next_prompts(
                    10
                )
            )
        )
        == 10
    )


def test_the_shuffled_order_is_pinned(ten, tokenizer):
    """A run resumes alike under any later version of numpy and of this project."""
    source = PromptSource(
        dataclasses.replace(ten, rollout_shuffle=True, rollout_seed=42), tokenizer
    )
    assert numbers(source.next_prompts(20)) == PINNED


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("before", [0, 3, 10, 13, 27])
def test_resume_draws_what_an_uninterrupted_run_draws(ten, tokenizer, shuffle, before):
    config = dataclasses.replace(ten, rollout_shuffle=shuffle)
    full = PromptSource(config, tokenizer)
    if before:
        full.next_prompts(before)
    state = json.loads(json.dumps(full.state_dict()))
    resumed = PromptSource(config, tokenizer)
    resumed.load_state_dict(state)
    assert resumed.next_prompts(15) == full.next_prompts(15)
    assert resumed.state_dict() == full.state_dict()


def test_resume_with_other_data_is_refused(tmp_path, ten, tokenizer):
    state = PromptSource(ten, tokenizer).state_dict()
    rows = [{"input": f"other {i}", "label": str(i)} for i in range(10)]
    other = dataclasses.replace(ten, prompt_data=write_rows(tmp_path / "other.jsonl", rows))
    fewer = dataclasses.replace(ten, prompt_data=ten.prompt_data + "@[0:9]")
    for config, words in [
        (other, "content: saved"),
        (fewer, "num_rows: saved 10, now 9"),
        (dataclasses.replace(ten, rollout_shuffle=True), "order: saved 'file', now 'seed=42'"),
        (dataclasses.replace(ten, rollout_max_prompt_len=10), "num_prompts: saved 10, now 3"),
    ]:
        with pytest.raises(ValueError, match=rf"--prompt-data .*cannot be resumed: .*{words}"):
            PromptSource(config, tokenizer).load_state_dict(state)


def test_resume_from_a_moved_copy(tmp_path, ten, tokenizer):
    source = PromptSource(ten, tokenizer)
    source.next_prompts(3)
    copy = tmp_path / "moved.jsonl"
    copy.write_bytes((tmp_path / "ten.jsonl").read_bytes())
    moved = PromptSource(dataclasses.replace(ten, prompt_data=str(copy)), tokenizer)
    moved.load_state_dict(source.state_dict())
    assert numbers(moved.next_prompts(2)) == [3, 4]


def test_resume_from_a_state_without_the_checksum_of_parquet(tmp_path, tokenizer):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"input": ["prompt 0", "prompt 1"], "label": ["2", "3"]}), path)
    config = DataConfig(prompt_data=path, label_key="label")
    source = PromptSource(config, tokenizer)
    source.next_prompts(1)
    state = source.state_dict()
    pq.write_table(pa.table({"input": ["prompt 0", "prompt 1"], "label": ["9", "3"]}), path)
    with pytest.raises(ValueError, match="cannot be resumed: content: saved 'parquet crc32="):
        PromptSource(config, tokenizer).load_state_dict(state)
    content = re.sub(" crc32=[0-9a-f]{8}", "", state["source"]["content"])
    earlier = PromptSource(config, tokenizer)
    earlier.load_state_dict({**state, "source": {**state["source"], "content": content}})
    assert [prompt.text for prompt in earlier.next_prompts(1)] == ["prompt 1"]


def test_long_prompts_are_left_out_and_counted(ten, tokenizer):
    source = PromptSource(
        dataclasses.replace(ten, rollout_max_prompt_len=12), tokenizer
    )  # "prompt 4!!!!" has 12
    assert len(source) == 5
    assert source.num_left_out == 5
    assert numbers(source.next_prompts(7)) == [0, 1, 2, 3, 4, 0, 1]
    assert source.notes == [
        f"{ten.prompt_data}: dropped 5 of 10 prompts, longer than --rollout-max-prompt-len 12"
    ]
    assert PromptSource(ten, tokenizer).notes == []


def test_notes_of_bad_and_long_rows_come_once_for_each_set(tmp_path, tokenizer, caplog, capfd):
    """Every rank opens the data, so nothing here prints; the trainer does, on one rank."""
    path = write_rows(
        tmp_path / "a.jsonl", [{"input": ""}, {"input": "short"}, {}, {"input": "much longer"}]
    )
    data = DataConfig(prompt_data=path, skip_bad_rows=3, rollout_max_prompt_len=5)
    bad, long = PromptSource(data, tokenizer).notes
    assert bad.startswith(
        f"{path}: skipped 2 bad rows (--skip-bad-rows 3); the first: {path}:1: 'input' (--input-key) is empty"
    )
    assert long == f"{path}: dropped 1 of 2 prompts, longer than --rollout-max-prompt-len 5"
    ranged = path + "@[0:2]"
    sets, notes = load_eval_sets(
        command_line_sets(EvalConfig(eval_prompt_data=["a", path, "b", ranged])), data, tokenizer
    )
    assert {name: len(prompts) for name, prompts in sets.items()} == {"a": 1, "b": 1}
    assert notes == [
        bad,
        long,
        bad,
        f"{ranged}: dropped 1 of 2 prompts, longer than --rollout-max-prompt-len 5",
    ]
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


def test_every_prompt_too_long(ten, tokenizer):
    with pytest.raises(
        ValueError,
        match=r"--rollout-max-prompt-len 3: .*the shortest has 8 tokens",
    ):
        PromptSource(dataclasses.replace(ten, rollout_max_prompt_len=3), tokenizer)


def test_a_prompt_of_a_megabyte(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [{"input": "word " * 200_000}, {"input": "short"}])
    source = PromptSource(DataConfig(prompt_data=path, rollout_max_prompt_len=100), tokenizer)
    assert source.num_left_out == 1
    assert [p.text for p in source.next_prompts(2)] == ["short", "short"]


def test_parquet_prompts(tmp_path, tokenizer):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"input": f"p{i}", "label": i, "metadata": {"number": i}} for i in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=4)
    config = DataConfig(
        prompt_data=str(tmp_path / "a.parquet"), label_key="label", rollout_shuffle=True
    )
    prompts = PromptSource(config, tokenizer).next_prompts(30)
    assert sorted(numbers(prompts)) == list(range(30))
    assert all(p.text == f"p{p.label}" and p.label == p.metadata["number"] for p in prompts)


def test_reasoning_gym_prompts(tokenizer):
    pytest.importorskip("reasoning_gym")
    prompts = PromptSource(
        DataConfig(prompt_data="reasoning_gym:chain_sum?size=4&seed=2", label_key="answer"),
        tokenizer,
    ).next_prompts(5)
    assert prompts[4].text == prompts[0].text
    assert prompts[0].metadata["entry"]["answer"] == prompts[0].label


TASK = "reasoning_gym:chain_sum?size=4&seed=2"


def graded(grader, prompts, responses):
    samples = [
        Sample(
            p.group_id,
            i,
            torch.tensor([1]),
            1,
            torch.ones(1, dtype=torch.bool),
            label=p.label,
            metadata=p.metadata,
            response=r,
        )
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]
    return [sample.reward for sample in grader.grade(samples)]


def test_a_reasoning_gym_source_scores_itself_unless_a_reward_is_named(tokenizer):
    pytest.importorskip("reasoning_gym")
    source = PromptSource(
        DataConfig(prompt_data=TASK), tokenizer, answer_check=answer_check(None, None)
    )
    prompts = source.next_prompts(2)
    responses = [f"<answer>{prompts[0].label}</answer>", "<answer>?</answer>"]
    with Grader(rm_type=None, rm_num_workers=1, rm_type_from_metadata=True) as grader:
        right, wrong = graded(grader, prompts, responses)
        assert (right, wrong < 0.5) == (1.0, True)
        own = dataclasses.replace(
            prompts[0], metadata={**prompts[0].metadata, "rm_type": "exact_match"}
        )
        assert graded(grader, [own, own], [responses[0], own.label]) == [0.0, 1.0]
    with Grader(
        rm_type="exact_match"
    ) as grader:  # named: it does not look into the tags, which the task's scorer does
        assert graded(grader, prompts, [responses[0], prompts[1].label]) == [0.0, 1.0]


@pytest.mark.parametrize("is_task_trained_on", [True, False])
def test_files_and_tasks_next_to_each_other(tmp_path, chat_tokenizer, is_task_trained_on):
    """--input-key, --label-key and --metadata-key speak of files."""
    pytest.importorskip("reasoning_gym")
    rows = [
        {
            "messages": [{"role": "user", "content": "six"}],
            "reply": "6",
            "about": {"rm_type": "exact_match"},
        }
    ]
    file = write_rows(tmp_path / "a.jsonl", rows)
    trained, other = (TASK, file) if is_task_trained_on else (file, TASK)
    data = DataConfig(
        prompt_data=trained,
        input_key="messages",
        label_key="reply",
        metadata_key="about",
        apply_chat_template=True,
    )
    check = answer_check(None, None, from_metadata=True)
    (prompt,) = PromptSource(data, chat_tokenizer, answer_check=check).next_prompts(1)
    sets, notes = load_eval_sets(
        command_line_sets(EvalConfig(eval_prompt_data=["b", other])),
        data,
        chat_tokenizer,
        answer_check=check,
    )
    assert notes == []
    of_task, of_file = (prompt, sets["b"][0]) if is_task_trained_on else (sets["b"][0], prompt)
    entry = of_task.metadata["entry"]
    assert (of_task.text, of_task.label) == (
        f"<user>{entry['question']}</user><assistant>",
        entry["answer"],
    )
    assert (of_file.text, of_file.label, of_file.metadata) == (
        "<user>six</user><assistant>",
        "6",
        {"rm_type": "exact_match"},
    )
    with Grader(rm_num_workers=1, rm_type_from_metadata=True) as grader:
        assert graded(grader, [of_task, of_file], [entry["answer"], "6"]) == [1.0, 1.0]


def test_keys_of_eval_files_do_not_reach_a_task(tmp_path, tokenizer):
    pytest.importorskip("reasoning_gym")
    config = EvalConfig(
        eval_prompt_data=["b", TASK], eval_input_key="prompt", eval_label_key="solution"
    )
    sets, _ = load_eval_sets(command_line_sets(config), DataConfig(), tokenizer)
    assert sets["b"][0].label == sets["b"][0].metadata["entry"]["answer"]


TASK_ROW = {
    "task": {"name": "chain_sum", "options": {"size": 1}},
    "entry": {"question": "1+1", "answer": "2"},
}


@pytest.mark.parametrize(
    ("rm_type", "row", "words"),
    [
        (
            "exact_match",
            {"label": None},
            "the label is missing or null; name its field with --label-key",
        ),
        ("gsm8k", {"label": None}, "the label is missing or null"),
        ("gsm8k", {"label": "seven"}, "the label holds no number: 'seven'"),
        ("math", {"label": None}, "the label is missing or null"),
        ("math", {"label": " "}, r"the label \(--label-key\) is empty"),
        (
            "task",
            {"label": "7"},
            r"the reward task needs 'task' \(name, options\) and 'entry' in the row's metadata \(--metadata-key\)",
        ),
        (
            "task",
            {"label": "7", "metadata": {"task": "chain_sum", "entry": {}}},
            "the reward task needs",
        ),
        (
            "task",
            {"label": None, "metadata": {**TASK_ROW, "rm_type": "exact_match"}},
            "the label is missing or null",
        ),
        ("exact_match", {"label": "7", "metadata": {"rm_type": "task"}}, "the reward task needs"),
        (
            "exact_match",
            {"label": "7", "metadata": {"rm_type": "maths"}},
            "metadata rm_type 'maths': unknown reward; legal values: choice, code, dapo",
        ),
        (
            None,
            {"label": "7"},
            "no reward: give --rm-type, --custom-rm-path, or --rm-type-from-metadata and rm_type in",
        ),
    ],
)
def test_a_row_that_cannot_be_graded_is_refused_when_the_file_is_opened(
    tmp_path, tokenizer, rm_type, row, words
):
    pytest.importorskip("math_verify")
    pytest.importorskip("reasoning_gym")
    good = {
        "input": "p",
        "label": "7",
        "metadata": {**TASK_ROW, **({} if rm_type is None else {"rm_type": rm_type})},
    }
    data = DataConfig(
        prompt_data=write_rows(tmp_path / "a.jsonl", [good, {"input": "p", **row}]),
        label_key="label",
    )
    check = answer_check(rm_type, None, from_metadata=True)
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: {words}"):
        PromptSource(data, tokenizer, answer_check=check)
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: {words}"):
        load_eval_sets(
            command_line_sets(EvalConfig(eval_prompt_data=["a", data.prompt_data])),
            data,
            tokenizer,
            answer_check=check,
        )
    assert (
        len(PromptSource(dataclasses.replace(data, skip_bad_rows=1), tokenizer, answer_check=check))
        == 1
    )
    assert (
        len(PromptSource(data, tokenizer, answer_check=answer_check(rm_type, "mine.score"))) == 2
    )  # its own business


def test_a_row_without_label_key_has_no_label(tmp_path, tokenizer):
    data = DataConfig(prompt_data=write_rows(tmp_path / "a.jsonl", [{"input": "p", "label": "7"}]))
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:1: the label is missing or null; name its field with --label-key",
    ):
        PromptSource(data, tokenizer, answer_check=answer_check("gsm8k", None))


def test_a_row_that_chooses_its_reward_needs_the_flag(tmp_path, tokenizer):
    """Whoever wrote the data would choose what runs here."""
    rows = [{"input": "p", "label": "7", "metadata": {"rm_type": "code"}}]
    data = DataConfig(prompt_data=write_rows(tmp_path / "a.jsonl", rows), label_key="label")
    words = r"a\.jsonl:1: the row's metadata asks for rm_type 'code'; .*--rm-type-from-metadata"
    with pytest.raises(ValueError, match=words):
        PromptSource(data, tokenizer, answer_check=answer_check("gsm8k", None))
    rows[0]["metadata"]["rm_type"] = "gsm8k"  # the run's own
    write_rows(tmp_path / "a.jsonl", rows)
    assert len(PromptSource(data, tokenizer, answer_check=answer_check("gsm8k", None))) == 1


def test_a_missing_library_of_a_rows_own_reward(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    data = DataConfig(
        prompt_data=write_rows(
            tmp_path / "a.jsonl", [{"input": "p", "label": "7", "metadata": {"rm_type": "math"}}]
        ),
        label_key="label",
    )
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:1: the reward math needs math-verify; install it with: pip install",
    ):
        PromptSource(data, tokenizer, answer_check=answer_check("gsm8k", None, from_metadata=True))


@pytest.mark.parametrize(
    ("label", "found"),
    [(None, "null or missing"), ("", "an empty string"), (3, "int"), (["a"], "list")],
)
def test_rows_to_learn_from_need_a_text(tmp_path, tokenizer, label, found):
    rows = [{"input": "p", "label": "a"}, {"input": "p", "label": label}]
    data = DataConfig(prompt_data=write_rows(tmp_path / "a.jsonl", rows), label_key="label")
    words = rf"a\.jsonl:2: --loss-type sft_loss: the answer \(--label-key\) must be non-empty text, not {found}"
    with pytest.raises(ValueError, match=words):
        PromptSource(data, tokenizer, answer_check=answer_problem)


def test_eval_sets(tmp_path, ten, tokenizer):
    gsm8k = write_rows(tmp_path / "g.jsonl", GSM8K)
    config = EvalConfig(
        eval_prompt_data=["gsm8k", gsm8k, "head", gsm8k + "@[0:1]"],
        eval_input_key="question",
        eval_label_key="answer",
    )
    sets, notes = load_eval_sets(command_line_sets(config), ten, tokenizer)
    assert notes == []
    assert {name: len(prompts) for name, prompts in sets.items()} == {"gsm8k": 3, "head": 1}
    assert [p.group_id for prompts in sets.values() for p in prompts] == [0, 1, 2, 3]
    assert sets["head"][0].label == GSM8K[0]["answer"]
    assert load_eval_sets(command_line_sets(EvalConfig()), ten, tokenizer) == ({}, [])


def test_eval_keys_default_to_those_of_training(ten, tokenizer):
    sets, _ = load_eval_sets(
        command_line_sets(EvalConfig(eval_prompt_data=["ten", ten.prompt_data])), ten, tokenizer
    )
    assert [p.label for p in sets["ten"]] == [str(i) for i in range(10)]


def test_eval_errors(ten, tokenizer):
    with pytest.raises(ValueError, match=r"--eval-prompt-data none\.jsonl: no such file"):
        load_eval_sets(
            command_line_sets(EvalConfig(eval_prompt_data=["a", "none.jsonl"])), ten, tokenizer
        )


def test_sft_samples_train_on_the_answer_and_its_end(tmp_path, tokenizer):
    config = DataConfig(
        prompt_data=write_rows(tmp_path / "g.jsonl", GSM8K),
        input_key="question",
        label_key="answer",
    )
    prompts = PromptSource(config, tokenizer).next_prompts(3)
    for prompt, sample in zip(prompts, sft_samples(prompts, tokenizer)):
        assert tokenizer.decode(sample.tokens) == prompt.text + prompt.label + "<eos>"
        assert sample.tokens[: sample.prompt_length].tolist() == list(prompt.tokens)
        assert sample.response_length == len(prompt.label.encode()) + 1
        assert sample.loss_mask.tolist() == [True] * sample.response_length
        assert sample.status == SampleStatus.COMPLETED


def test_sft_answers_are_cut_and_not_ended_twice(tmp_path, tokenizer):
    rows = [
        {"input": "p", "label": "answer<eos>"},
        {"input": "p", "label": "abc"},
        {"input": "p", "label": "abcd"},
    ]
    prompts = PromptSource(
        DataConfig(prompt_data=write_rows(tmp_path / "a.jsonl", rows), label_key="label"), tokenizer
    ).next_prompts(3)
    ended, fits, cut = sft_samples(prompts[:1], tokenizer) + sft_samples(
        prompts[1:], tokenizer, max_response_len=4
    )
    assert tokenizer.decode(ended.tokens) == "panswer<eos>"
    assert (tokenizer.decode(fits.tokens), fits.status) == ("pabc<eos>", SampleStatus.COMPLETED)
    assert (tokenizer.decode(cut.tokens), cut.status) == ("pabcd", SampleStatus.TRUNCATED)


def test_sft_errors(tmp_path, tokenizer):
    rows = [{"input": "p", "label": 3}]
    prompts = PromptSource(
        DataConfig(prompt_data=write_rows(tmp_path / "a.jsonl", rows), label_key="label"), tokenizer
    ).next_prompts(1)
    with pytest.raises(
        ValueError, match=r"prompt 0: .*\(--label-key\) must be non-empty text, not int: 'p'"
    ):
        sft_samples(prompts, tokenizer)
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        sft_samples(prompts, endless)


def test_an_evaluation_set_has_its_own_reward_template_and_limit(chat_tokenizer, tmp_path):
    """Its rows are checked for its reward, not for the run's."""
    path = write_rows(
        tmp_path / "a.jsonl",
        [{"input": "1+1=", "label": "#### 2"}, {"input": "1" * 50, "label": "#### 3"}],
    )
    own = EvalSet("a", path, rm_type="gsm8k", apply_chat_template=True, max_prompt_len=40)
    sets, notes = load_eval_sets(
        [own, EvalSet("b", path)], DataConfig(label_key="label"), chat_tokenizer, answer_check=answer_check("exact_match", None)
    )  # fmt: skip
    assert [prompt.text for prompt in sets["a"]] == ["<user>1+1=</user><assistant>"]
    assert sets["a"][0].metadata == {"rm_type": "gsm8k"}
    assert [prompt.text for prompt in sets["b"]] == ["1+1=", "1" * 50]
    assert notes == [f"{path}: dropped 1 of 2 prompts, longer than a's max_prompt_len 40"]
    none = dataclasses.replace(own, max_prompt_len=2)
    with pytest.raises(
        ValueError, match=rf"^a's max_prompt_len 2: every prompt of --eval-config {path} "
    ):
        load_eval_sets(
            [none],
            DataConfig(label_key="label"),
            chat_tokenizer,
            flag_of=lambda each: "--eval-config",
        )

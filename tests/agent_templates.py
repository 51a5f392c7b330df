"""Small chat templates modelled on those of sixteen families, and a tokenizer with their special
tokens: byte pairs, trained on little text, so that a text has many tokenisations."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

BLOCK = "{%- for m in messages %}"
END = "{%- endfor %}"
TOOLS = "{%- if tools %}TOOLS{% for t in tools %}{{ t | tojson }}{% endfor %}\n{% endif %}"
HERMES_CALLS = (
    "{%- for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A chat template, and how its model writes answers."""

    template: str  # Jinja
    ends: str  # what the model writes at the end of an answer
    # how it writes a call, given name and JSON of the arguments; several follow each other, or are
    # a list in `wrap`
    call: str
    wrap: str = "{}"
    between: str = ""
    format: str = "hermes"
    thinks: bool = False  # whether the template drops thoughts of earlier answers
    parallel: bool = True


def chatml(body: str, calls: str = HERMES_CALLS, *, thought: str = "", opening: str = "") -> str:
    return (
        TOOLS + BLOCK + "{%- if m.role == 'assistant' %}<|im_start|>assistant\n" + thought + body + calls
        + "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}" + END
        + "{%- if add_generation_prompt %}<|im_start|>assistant\n" + opening + "{% endif %}"
    )  # fmt: skip


KEEPS_LAST_THOUGHT = (
    "{%- set later = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list %}"
    "{%- if not later %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
)
XML_CALLS = (
    "{%- for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
FAMILIES = {
    "chatml": Family(chatml("{{ m.content }}"), "<|im_end|>", '\n<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>'),
    "qwen3": Family(chatml("{{ m.content }}", thought=KEEPS_LAST_THOUGHT), "<|im_end|>",
                    '\n<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>', thinks=True),
    "qwen3_open_thought": Family(chatml("{{ m.content }}", thought=KEEPS_LAST_THOUGHT, opening="<think>\n"), "<|im_end|>",
                                 '\n<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>', thinks=True),
    "qwen3_coder": Family(chatml("{{ m.content }}", XML_CALLS), "<|im_end|>", "XML", format="qwen3_coder"),
    "llama3": Family(
        "<|begin_of_text|>" + TOOLS + "{# <|python_tag|> parameters #}" + BLOCK
        + "{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
        "{% else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
        + END + "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>", '{{"name": "{0}", "parameters": {1}}}', format="llama3", parallel=False),
    "llama2": Family(
        "<s>{# <tool_call> #}" + TOOLS + BLOCK + "{%- if m.role == 'assistant' %} {{ m.content }}" + HERMES_CALLS
        + "</s>{% else %}[INST] {{ m.content }} [/INST]{% endif %}" + END,
        "</s>", '\n<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>'),
    "mistral": Family(
        "<s>" + TOOLS + BLOCK + "{%- if m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]</s>'
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
        "{% else %}[INST] {{ m.content }}[/INST]{% endif %}" + END,
        "</s>", '{{"name": "{0}", "arguments": {1}}}', wrap="[TOOL_CALLS] [{}]", between=", ", format="mistral_list"),
    "mistral_args": Family(
        "<s>" + TOOLS + BLOCK + "{%- if m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
        "{{ c.function.arguments | tojson }}{% endfor %}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %}[INST]{{ m.content }}[/INST]{% endif %}" + END,
        "</s>", "[TOOL_CALLS]{0}[ARGS]{1}", format="mistral"),
    "deepseek": Family(
        "<s>" + TOOLS + BLOCK + "{%- if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}"
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
        "{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}</s>"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else %}{{ m.content }}{% endif %}" + END
        + "{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        "</s>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{0}\n```json\n{1}\n```<｜tool▁call▁end｜>",
        wrap="<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", format="deepseek"),
    # as DeepSeek's own: calls only where there is no text at all, and arguments joined as texts
    "deepseek_r1": Family(
        "<s>" + TOOLS + BLOCK + "{%- if m.role == 'user' %}<｜User｜>{{ m['content'] }}{% elif m.role == 'assistant' and m['content'] is none %}"
        "<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n'"
        " + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜></s>"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m['content'] }}</s>"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m['content'] }}<｜tool▁output▁end｜>{% else %}{{ m['content'] }}{% endif %}" + END
        + "{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        "</s>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{0}\n```json\n{1}\n```<｜tool▁call▁end｜>",
        wrap="<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", format="deepseek"),
    "kimi": Family(
        TOOLS + BLOCK + "{%- if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}"
        "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>"
        "{% else %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endif %}" + END
        + "{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
        "<|im_end|>", "<|tool_call_begin|>functions.{0}:0<|tool_call_argument_begin|>{1}<|tool_call_end|>",
        wrap="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", format="kimi"),
    "harmony": Family(
        TOOLS + BLOCK + "{%- if m.role == 'assistant' and m.tool_calls %}{% for c in m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions."
        "{{ c.function.name }} <|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + END
        + "{%- if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|return|>", "<|channel|>commentary to=functions.{0} <|constrain|>json<|message|>{1}<|call|>", format="harmony", parallel=False),
    "gemma": Family(
        "<s>{# ```tool_code #}" + TOOLS + BLOCK + "{%- if m.role == 'assistant' %}<start_of_turn>model\n{{ m.content | trim }}"
        "{% for c in m.tool_calls or [] %}\n```tool_code\n{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{% endfor %})\n```{% endfor %}<end_of_turn>\n{% else %}<start_of_turn>user\n{{ m.content | trim }}<end_of_turn>\n{% endif %}" + END
        + "{%- if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>", "PYTHON", format="python"),
    "phi": Family(
        TOOLS + BLOCK + "{%- if m.role == 'assistant' %}<|assistant|>{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call|>"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}<|/tool_call|>{% endfor %}<|end|>'
        "{% else %}<|user|>{{ m.content }}<|end|>{% endif %}" + END + "{%- if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|end|>", '<|tool_call|>{{"name": "{0}", "arguments": {1}}}<|/tool_call|>', format="phi"),
    "granite": Family(
        TOOLS + BLOCK + "{%- if m.tool_calls %}<|start_of_role|>assistant<|end_of_role|>{{ m.content }}<|tool_call|>[{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}]</s>\n'
        "{% else %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}</s>\n{% endif %}" + END
        + "{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        "</s>", '{{"name": "{0}", "arguments": {1}}}', wrap="<|tool_call|>[{}]", between=", ", format="granite"),
    "command": Family(
        TOOLS + BLOCK + "{%- if m.role == 'assistant' %}<|CHATBOT|>{{ m.content }}{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}"
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{{ \", \" if not loop.last }}{% endfor %}]<|END_ACTION|>{% endif %}<|END_OF_TURN|>"
        "{% else %}<|USER|>{{ m.content }}<|END_OF_TURN|>{% endif %}" + END + "{%- if add_generation_prompt %}<|CHATBOT|>{% endif %}",
        "<|END_OF_TURN|>", '{{"tool_call_id": "0", "tool_name": "{0}", "parameters": {1}}}',
        wrap="<|START_ACTION|>[{}]<|END_ACTION|>", between=", ", format="command"),
    "glm": Family(
        "[gMASK]<sop>" + TOOLS + BLOCK + "{%- if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>"
        "{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}"
        "</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}" + END + "{%- if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|endoftext|>", "XML_PAIRS", format="glm"),
}  # fmt: skip
MARKS = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "<｜User｜>",
    "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|im_assistant|>", "<|im_user|>", "<|im_middle|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    "<|constrain|>", "<start_of_turn>", "<end_of_turn>", "<|assistant|>", "<|user|>", "<|tool_call|>", "<|/tool_call|>", "<|start_of_role|>",
    "<|end_of_role|>", "<|CHATBOT|>", "<|USER|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|END_OF_TURN|>", "<|endoftext|>", "<|observation|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|pad|>",
]  # fmt: skip


@functools.cache
def _backend() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["the answer of the tool is what the weather in Paris was, and STOP here it stops"] * 3,
        trainer,
    )
    return tokenizer.to_str()


@functools.cache
def make_tokenizer(family: Family) -> Any:
    """Of a family: its template and the token that ends its answers."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        eos_token=family.ends,
        pad_token="<|pad|>",
        additional_special_tokens=MARKS,
        chat_template=family.template,
    )


def call_text(family: Family, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """How a model of the family writes calls."""
    import json

    texts = []
    for name, arguments in calls:
        if family.call == "XML":
            pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
            texts.append(f"\n<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>")
        elif family.call == "XML_PAIRS":
            pairs = "".join(
                f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n"
                for k, v in arguments.items()
            )
            texts.append(f"\n<tool_call>{name}\n{pairs}</tool_call>")
        elif family.call == "PYTHON":
            pairs = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
            texts.append(f"\n```tool_code\n{name}({pairs})\n```")
        else:
            texts.append(family.call.format(name, json.dumps(arguments, ensure_ascii=False)))
    return family.wrap.format(family.between.join(texts))

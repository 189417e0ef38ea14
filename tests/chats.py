"""Conversations of several turns, how tests have them asked and answered, and chat templates with the traits of public
ones, written anew."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from worlds import tiny_llama_dir

from draftsmith.data import prompts, responses
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows

TARGET = "embedded:draft-small"  # a trained model of one layer: it ends its answers, and is fast
FUNCTIONS = [
    "def area(width: int, height: int) -> int:\n    return width * height",
    "def add(first, second):\n    return first + second",
    "def total(values: list) -> int:\n    s = 0\n    for value in values:\n        s += value\n    return s",
]
WISHES = ["Remove the type hints:\n\n", "Add a docstring:\n\n", "Rename the function to work:\n\n"]
USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
MAX_NEW = 60


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def conversation(number: int) -> list[dict[str, str]]:
    """One to three turns, with answers that the target would not give; some begin with a system message."""
    messages = chat((SYSTEM, "Be brief.")) if number % 4 == 3 else []
    for turn in range(1 + number % 3):
        wish = WISHES[(number + turn) % 3] + FUNCTIONS[(number // 3 + turn) % 3]
        messages += chat((USER, wish), (ASSISTANT, f"As you wish, {turn}."))
    return messages


NUM_ROWS = 7
REWRITES = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{{ m.content.split('\n')[1:] | join('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_prompts(source: Path, output: Path, **settings) -> Path:
    return prompts.run(prompts.PromptsConfig(str(source), TARGET, output, **settings))


def make_responses(asked: Path, output: Path, **settings) -> Path:
    own = {"temperature": 0.0, "max_new_tokens": MAX_NEW, "rows_per_shard": 3, "batch_size": 2, "num_threads": 1}
    return responses.run(responses.ResponsesConfig(asked, TARGET, output, **{**own, **settings}))


def rows_of(directory: Path) -> list[dict]:
    return Rows(Manifest.read(directory)).read(0, 99)


def counts_of(directory: Path) -> dict[str, int]:
    return Manifest.read(directory).counts


SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<|eom|>", "<|python_tag|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|User|>", "<|Assistant|>", "<|eos|>"),
]

# Qwen2.5, SmolLM2: a default system message, a line break behind every turn, calls as text.
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif m.tool_calls %}{{ '<|im_start|>assistant' + ('\\n' + m.content if m.content else '') }}
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

# The same with tags that leave the line break out, as SmolLM3 has them.
CHATML_TAGGED = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

# Llama 3.1: headers, trimmed text, today's date.
LLAMA3 = """\
{{- '<|begin|><|header|>system<|/header|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '<|eot|>' }}
{%- for m in messages %}
    {{- '<|header|>' + m.role + '<|/header|>\\n\\n' + m.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}"""

# Mistral v3: no generation prompt.
MISTRAL = """\
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
    {%- else %}{{ ' ' + m.content + '</s>' }}{%- endif %}
{%- endfor %}"""

# gpt-oss: channels; the last answer shows its thinking and ends with another token than the others.
HARMONY = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"""

# Qwen3: thinking is shown behind the last question only, if empty too.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}{{ m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# DeepSeek-R1's distillations: a prompt opens the thought that no answer shows later.
R1 = """\
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
    {%- else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|eos|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{%- endif %}"""


@functools.cache
def chat_tokenizer(template: str, end: str = "<|im_end|>", more: tuple[str, ...] = ()) -> Any:
    """A byte-level tokenizer of single bytes, two line breaks in one token, the special tokens of all templates, and
    more of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["\n\n"] * 9, trainers.BpeTrainer(vocab_size=257, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *more)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token="<s>", chat_template=template, model_max_length=2048
    )


def chat_model(path: Path, template: str, end: str = "<|im_end|>", more: tuple[str, ...] = (), **extra: Any) -> Path:
    """A tiny target with this template. more: special tokens. extra: fields of its config."""
    tokenizer = chat_tokenizer(template, end, more)
    directory = tiny_llama_dir(path, vocab=len(tokenizer), **{"max_position_embeddings": 2048, **extra})
    tokenizer.save_pretrained(str(directory))
    return directory


def rendered(template: str, messages: list[dict], **variables: Any) -> str:
    """The template's text by jinja itself, with transformers' settings."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    environment.globals["strftime_now"] = lambda form: variables["now"].strftime(form)
    return environment.from_string(template).render(messages=messages, **variables)


def text_of(row: dict, name: str = "input_ids") -> str:
    """The text of a row's tokens."""
    return chat_tokenizer(CHATML).decode(row[name])


def learned(row: dict) -> str:
    """The text of the tokens that the loss counts."""
    mask = row["loss_mask"]
    return chat_tokenizer(CHATML).decode([t for t, counted in zip(row["input_ids"], mask, strict=True) if counted])

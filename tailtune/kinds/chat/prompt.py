"""One prompt for training, evaluation, `ask` and serving: the messages and a frozen chat template.

SmolLM3's own template writes today's date and a thinking marker, so a model that is trained today would get another
prompt tomorrow. The frozen template is plain ChatML, the format on which SmolLM3's own one is based. It is saved with
the tokenizer in `best_model/`.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from tailtune.config import fill_template
from tailtune.errors import UserError
from tailtune.kinds.chat.config import Prompt
from tailtune.log import log

CHATML = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)
"""Nothing follows the last `<|im_end|>`, so the answer's last label is the token that ends it."""

PLAIN = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{{ message['role'] + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nassistant:\\n' }}{% endif %}"
)
"""For tokenizers without ChatML's markers and without a template of their own."""


def freeze_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a template that renders the same text every day, and a pad token, in place.

    The template is ChatML where the vocabulary has its markers; otherwise the tokenizer's own, when it does not use the
    date; otherwise plain `role: text` lines that end in the end-of-text token. Raises UserError when the tokenizer has
    no end-of-text token.
    """
    vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template
    if "<|im_start|>" in vocabulary and "<|im_end|>" in vocabulary:
        tokenizer.chat_template = CHATML
        tokenizer.eos_token = "<|im_end|>"
    elif not isinstance(template, str) or "strftime_now" in template or "date_string" in template:
        tokenizer.chat_template = PLAIN
        log.info(
            "prompt: the tokenizer has no ChatML markers and no chat template that is independent of the date; "
            "plain text is used"
        )
    if tokenizer.eos_token is None:
        raise UserError(
            "the tokenizer has no end-of-text token, so no answer would ever end",
            "set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def question_messages(prompt: Prompt, question: str) -> list[dict[str, str]]:
    """The system and the user message of one question."""
    return [{"role": "system", "content": prompt.system.strip()}, {"role": "user", "content": question}]


def row_question(prompt: Prompt, row: Mapping[str, Any]) -> str:
    """The question of a row, by the prompt's template."""
    return fill_template(prompt.user, row)


def row_answer(prompt: Prompt, row: Mapping[str, Any]) -> str:
    """The reference answer of a row, by the prompt's template."""
    return fill_template(prompt.assistant, row)


def training_example(prompt: Prompt, row: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """One row in TRL's prompt/completion form, for which TRL labels only the answer and needs no template markers."""
    return {
        "prompt": question_messages(prompt, row_question(prompt, row)),
        "completion": [{"role": "assistant", "content": row_answer(prompt, row)}],
    }


def encode_question(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, question: str) -> list[int]:
    """Token ids up to and including the header of the assistant's turn."""
    encoded = tokenizer.apply_chat_template(
        question_messages(prompt, question), add_generation_prompt=True, return_dict=True
    )
    return list(encoded["input_ids"])


def encode_row(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, row: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """Token ids of a row's prompt and of its answer with the end mark, as the trainer sees them. Raises UserError."""
    example = training_example(prompt, row)
    question = encode_question(tokenizer, prompt, row_question(prompt, row))
    whole = tokenizer.apply_chat_template(example["prompt"] + example["completion"], return_dict=True)["input_ids"]
    if whole[: len(question)] != question:
        raise UserError(
            "the chat template renders the question differently when the answer follows",
            "use a base model with ChatML markers, or with a template that renders both alike",
        )
    return question, list(whole[len(question) :])

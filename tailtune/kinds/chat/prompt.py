"""One prompt for training, evaluation, `ask` and serving: a row's messages, a frozen chat template, and the labels.

SmolLM3's own template writes today's date and a thinking marker, so a model that is trained today would get another
prompt tomorrow. The frozen template is plain ChatML, the format on which SmolLM3's own one is based. It is saved with
the tokenizer in `best_model/`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from tailtune.config import Truncation, fill_template
from tailtune.errors import UserError, one_line
from tailtune.kinds.chat.config import Prompt
from tailtune.log import log
from tailtune.train.tail.tokenized_rows import IGNORED

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""

CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
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

CUT = "\ud800"
"""Where a rendered conversation is cut before it is tokenised. No text may contain it: UTF-8 has no surrogates."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Python reads bytes of a command line that are not UTF-8 as surrogates, and JSON can escape them."""


def freeze_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a template that renders the same text every day, and a pad token, in place.

    The template is ChatML where the vocabulary has its markers; otherwise the tokenizer's own, when it does not use the
    date; otherwise plain `role: text` lines that end in the end-of-text token. Raises UserError when the tokenizer has
    no end-of-text token.
    """
    vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template
    if all(marker in vocabulary for marker in CHATML_MARKERS):
        tokenizer.chat_template = CHATML
        tokenizer.eos_token = CHATML_MARKERS[1]
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


def question_messages(prompt: Prompt, question: str) -> list[Message]:
    """The system prompt, if there is one, and the user message of one question."""
    return [*_system_messages(prompt), {"role": "user", "content": question}]


def row_messages(prompt: Prompt, row: Mapping[str, Any]) -> list[Message]:
    """The conversation of a row: the last message, and every second one before it, is the assistant's.

    Answers lose the white space at their beginning. It would become one token with the line break before it, which
    a model that is asked has already read as a token of its own.
    """
    if prompt.messages is not None:
        own = [_without_leading_space(message) for message in row[prompt.messages]]
        return own if own[0]["role"] == "system" else [*_system_messages(prompt), *own]
    question, answer = fill_template(prompt.user or "", row), fill_template(prompt.assistant or "", row)
    return [*question_messages(prompt, question), {"role": "assistant", "content": answer.lstrip()}]


def _without_leading_space(message: Mapping[str, str]) -> Message:
    role, content = message["role"], message["content"]
    return {"role": role, "content": content.lstrip() if role == "assistant" else content}


def _system_messages(prompt: Prompt) -> list[Message]:
    return [{"role": "system", "content": prompt.system.strip()}] if prompt.system else []


def show_question(messages: list[Message]) -> str:
    """The text of a conversation's user; with the assistant's answers between, where there are any."""
    turns = [message for message in messages if message["role"] != "system"]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


@dataclass(frozen=True)
class Encoded:
    """A tokenised conversation."""

    ids: list[int]
    labels: list[int]
    """The token ids of the assistant's turns, each with its end mark, and IGNORED elsewhere."""

    @property
    def question_length(self) -> int:
        """Tokens before the first label."""
        return next(position for position, label in enumerate(self.labels) if label != IGNORED)

    def cut(self, truncation: Truncation) -> "Encoded":
        """The tokens that training keeps. Raises UserError when no label would be left to predict.

        Where the loss is on answers, TRL drops such rows without a word, from the validation rows too.
        """
        limit = truncation.max_length
        if limit is None or len(self.ids) <= limit:
            return self
        kept = slice(-limit, None) if truncation.keep_end else slice(limit)
        row = Encoded(self.ids[kept], [IGNORED, *self.labels[kept][1:]])  # nothing predicts the first token
        if not row.answer_ids:
            raise UserError(
                f"a question with its system prompt has {self.question_length} tokens, which leaves no room for its "
                f"answer in max_length {limit}",
                "raise stages.0.trainer.max_length or shorten prompt.system",
            )
        return row

    @property
    def answer_ids(self) -> list[int]:
        return [label for label in self.labels if label != IGNORED]


def encode_question(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Token ids up to and including the header of the assistant's turn that follows the messages. Raises UserError."""
    return _tokenize(tokenizer, _render(tokenizer, _with_cuts(tokenizer, messages), asks=True))


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Encoded:
    """Tokenise a conversation as one sequence, for training and for teacher-forced scores. Raises UserError.

    The last message is the assistant's. What precedes each label is what the model sees when it answers at that point
    of the conversation.
    """
    messages = _with_cuts(tokenizer, messages)
    text = ""
    ids: list[int] = []
    labels: list[int] = []
    first_char = first_token = 0  # of the last end mark: a special token, so what follows is tokenised on its own
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answered = _render(tokenizer, messages[:number], asks=True), _render(tokenizer, messages[: number + 1])
        if not (asked.startswith(text) and answered.startswith(asked)):
            raise UserError(
                "the chat template renders a question differently when the answer, or a further message, follows",
                "use a base model with ChatML markers, or with a template that renders all alike",
            )
        asked_ids, answered_ids = (_tokenize(tokenizer, each[first_char:]) for each in (asked, answered))
        known = ids[first_token:]
        if asked_ids[: len(known)] != known or answered_ids[: len(asked_ids)] != asked_ids:
            beginning = " ".join(message["content"].replace(CUT, "").split())[:60]
            raise UserError(
                f"the tokenizer joins the answer that begins with '{beginning}' with the text around it",
                "change this answer, or use a base model with ChatML markers",
            )
        text, ids[first_token:] = answered, answered_ids
        labels += [IGNORED] * (first_token + len(asked_ids) - len(labels)) + answered_ids[len(asked_ids) :]
        if text.endswith(tokenizer.eos_token):
            first_char, first_token = len(text) - len(tokenizer.eos_token), len(ids) - 1
    return Encoded(ids, labels)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, asks: bool = False) -> str:
    """The text of a conversation; `asks` adds the header of the assistant's turn that follows. Raises UserError."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))
    except MemoryError:
        raise
    except Exception as error:  # a template is a program
        raise UserError(
            f"the chat template cannot render a conversation: {type(error).__name__}: {one_line(error)}",
            "correct the base model's chat template, or use a model with ChatML markers",
        ) from None


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered text, as of `apply_chat_template` where the text has no cuts."""
    return [token for part in text.split(CUT) for token in tokenizer(part, add_special_tokens=False)["input_ids"]]


def spells_special_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> bool:
    """Whether a text of the conversation contains a special token, which is tokenised as text."""
    beginning = _special_token_beginning(tokenizer)
    return any(beginning.search(message["content"]) for message in messages)


def _with_cuts(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[Message]:
    """The messages with a cut in every special token that their text spells, so that it is tokenised as text.

    Otherwise a text with the marker of a turn would begin a turn, in training with a label.
    """
    for message in messages:
        if invalid := SURROGATE.search(message["content"]):
            raise UserError(
                f"a text contains {ascii(invalid[0])[1:-1]}, which is no character", "give the text in UTF-8"
            )
    beginning = _special_token_beginning(tokenizer)
    return [message | {"content": beginning.sub(rf"\g<0>{CUT}", message["content"])} for message in messages]


@lru_cache(maxsize=8)
def _special_token_beginning(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Match the first character of each special token in a text."""
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special or token.content in CHATML_MARKERS}
    return re.compile(f"(?={'|'.join(map(re.escape, special.union(tokenizer.all_special_tokens)))}).", re.DOTALL)


def encode_row(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, row: Mapping[str, Any]) -> Encoded:
    """Tokenise the conversation of a row. Raises UserError."""
    return encode_messages(tokenizer, row_messages(prompt, row))

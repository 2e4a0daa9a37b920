"""One prompt everywhere: no date, the same token ids every day, labels on the answer and its end."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tailtune.kinds.chat.config import Prompt
from tailtune.kinds.chat.prompt import (
    CHATML,
    PLAIN,
    encode_question,
    encode_row,
    freeze_chat_template,
    question_messages,
    training_example,
)

PROMPT = Prompt(system="  Answer in one sentence.\n", user="For {topic}, {full-question}", assistant="{answer}")
ROW = {"topic": "Knots", "full-question": "how do I tie one?", "answer": "Make a loop – then pass the end.\nPull."}
DATED = "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
OWN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}" \
      "{% if add_generation_prompt %}[assistant]{% endif %}"  # fmt: skip


def tiny_tokenizer(*markers: str, template: str | None = None, pad_token: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE with hardly any merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["</s>", "<pad>", *markers]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["a sentence to learn from"],
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token=pad_token)
    tokenizer.chat_template = template
    return tokenizer


def frozen(*markers: str, **arguments: Any) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(*markers, **arguments)
    freeze_chat_template(tokenizer)
    return tokenizer


MARKERS = ("<|im_start|>", "<|im_end|>")
TOKENIZERS = {
    "ChatML": lambda: frozen(*MARKERS),
    "ChatML with a date": lambda: frozen(*MARKERS, template=DATED),
    "plain": lambda: frozen(),
    "plain in place of a date": lambda: frozen(template=DATED),
    "its own": lambda: frozen(template=OWN),
}


@pytest.mark.parametrize(
    ("name", "template", "end"),
    [
        ("ChatML", CHATML, "<|im_end|>"),
        ("ChatML with a date", CHATML, "<|im_end|>"),
        ("plain", PLAIN, "</s>"),
        ("plain in place of a date", PLAIN, "</s>"),
        ("its own", OWN, "</s>"),
    ],
)
def test_template_of_a_tokenizer(name: str, template: str, end: str) -> None:
    tokenizer = TOKENIZERS[name]()
    assert (tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token) == (template, end, end)
    assert "strftime" not in tokenizer.chat_template and "date" not in tokenizer.chat_template


def test_one_marker_is_not_enough_for_chatml() -> None:
    assert frozen("<|im_start|>").chat_template == PLAIN


def test_a_pad_token_is_kept() -> None:
    assert frozen(*MARKERS, pad_token="<pad>").pad_token == "<pad>"


def test_freezing_twice_changes_nothing() -> None:
    tokenizer = frozen(*MARKERS)
    before = encode_row(tokenizer, PROMPT, ROW)
    freeze_chat_template(tokenizer)
    assert encode_row(tokenizer, PROMPT, ROW) == before


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_prompt_is_a_prefix_of_the_whole_row(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    example = training_example(PROMPT, ROW)
    whole = tokenizer.apply_chat_template(example["prompt"] + example["completion"], return_dict=True)["input_ids"]
    question, answer = encode_row(tokenizer, PROMPT, ROW)
    assert question + answer == list(whole)
    assert question == encode_question(tokenizer, PROMPT, "For Knots, how do I tie one?")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_labels_are_the_answer_and_its_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    _, answer = encode_row(tokenizer, PROMPT, ROW)
    assert answer[-1] == tokenizer.eos_token_id, "so that generation stops where training did"
    assert answer.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(answer[:-1]) == ROW["answer"]


def test_the_text_of_a_chatml_row() -> None:
    question, answer = encode_row(frozen(*MARKERS), PROMPT, ROW)
    assert frozen(*MARKERS).decode(question + answer) == (
        "<|im_start|>system\nAnswer in one sentence.<|im_end|>\n"
        "<|im_start|>user\nFor Knots, how do I tie one?<|im_end|>\n"
        "<|im_start|>assistant\nMake a loop – then pass the end.\nPull.<|im_end|>"
    )


def test_the_text_of_a_plain_row() -> None:
    question, answer = encode_row(frozen(), PROMPT, ROW)
    assert frozen().decode(question + answer) == (
        "system:\nAnswer in one sentence.\n\nuser:\nFor Knots, how do I tie one?\n\n"
        "assistant:\nMake a loop – then pass the end.\nPull.</s>"
    )


def test_the_prompt_survives_saving(tmp_path: Any) -> None:
    tokenizer = frozen(*MARKERS, template=DATED)
    tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert encode_row(loaded, PROMPT, ROW) == encode_row(tokenizer, PROMPT, ROW)
    assert loaded.eos_token == "<|im_end|>"


def test_braces_in_a_row_are_text() -> None:
    row = {**ROW, "full-question": "what is {answer}?", "answer": "{{ 7 * 7 }} {% raw %}"}
    example = training_example(PROMPT, row)
    assert example["prompt"] == question_messages(PROMPT, "For Knots, what is {answer}?")
    _, answer = encode_row(frozen(*MARKERS), PROMPT, row)
    assert frozen(*MARKERS).decode(answer) == "{{ 7 * 7 }} {% raw %}<|im_end|>"

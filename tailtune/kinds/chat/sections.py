"""The chat kind's part of the report: the demo questions, answered by base and tuned model, and how to load it."""

from pathlib import Path
from typing import Any

from tailtune.errors import printable
from tailtune.files import read_json, write_json, write_text
from tailtune.imports import uncollected
from tailtune.kinds.chat.config import Demo, Generation, Prompt
from tailtune.log import log
from tailtune.manifest import RESULTS_VERSION, directory_identity, publish, read_manifest


def write_demo(
    base: Path, tuned: Path, directory: Path, prompt: Prompt, generation: Generation, demo: Demo
) -> dict[str, Any]:
    """Ask both models the demo questions and publish `answers.json` and `answers.md` in `directory`.

    Returns the content of `answers.json`. A complete directory is left untouched.
    """
    settings = {"demo": demo, "generation": generation, "prompt": prompt}
    key = {
        "version": RESULTS_VERSION,
        "models": [directory_identity(base), directory_identity(tuned)],
        "recipe": {name: value.model_dump(mode="json") for name, value in settings.items()},
    }
    if read_manifest(directory, key):
        log.info("report: answers are complete")
    else:
        with uncollected():  # torch: seconds that a report without new answers does not need
            from tailtune.kinds.chat.inference import answer, load_chat_model
            from tailtune.kinds.chat.prompt import question_messages
        questions = [question_messages(prompt, question) for question in demo.questions]
        texts = {
            side: answer(load_chat_model(path), questions, generation, len(questions), "report").texts
            for side, path in (("base", base), ("tuned", tuned))
        }
        rows = [
            {"question": q, "base": b, "tuned": t}
            for q, b, t in zip(demo.questions, texts["base"], texts["tuned"], strict=True)
        ]
        with publish(directory, key, {"num_questions": len(rows)}) as partial:
            write_json(partial / "answers.json", {"answers": rows, "generation": generation.model_dump()})
            write_text(partial / "answers.md", answers_markdown(rows))
        log.info("report: %d questions answered by base and tuned", len(rows))
    return dict(read_json(directory / "answers.json"))


def loading_lines(prompt: Prompt, generation: Generation) -> list[str]:
    """Three lines of Python that answer as the report does, next to the folder `best_model` and without tailtune."""
    settings = {"do_sample": False, **generation.model_dump()}
    arguments = "".join(f", {name}={value}" for name, value in settings.items())
    system = '{"role": "system", "content": open("best_model/system_prompt.txt", encoding="utf-8").read()}, '
    question = f'{system if prompt.system else ""}{{"role": "user", "content": "YOUR QUESTION"}}'
    return [
        "from transformers import pipeline",
        f'chat = pipeline("text-generation", "best_model"{arguments})',
        f'print(chat([{question}])[0]["generated_text"][-1]["content"])',
    ]


def answers_markdown(rows: list[dict[str, str]]) -> str:
    """Questions and answers as indented blocks, so that no text is read as Markdown or by a terminal."""

    def block(text: str) -> str:
        return "\n".join(f"    {line}" for line in printable(text).splitlines()) or "    (empty)"

    parts = [
        f"## Question {number}\n\n{block(r['question'])}\n\nBase:\n\n{block(r['base'])}\n\n"
        f"Tuned:\n\n{block(r['tuned'])}\n"
        for number, r in enumerate(rows, 1)
    ]
    return "# Demo answers\n\n" + "\n".join(parts)

"""The report's section of the chat kind: the recipe's questions, answered by base and tuned model."""

from pathlib import Path
from typing import Any

from tailtune.files import read_json, write_json, write_text
from tailtune.kinds.chat.inference import answer, load_chat_model
from tailtune.log import log
from tailtune.manifest import RESULTS_VERSION, directory_identity, publish, read_manifest
from tailtune.recipe.schema import Recipe


def answer_questions(recipe: Recipe, base: Path, tuned: Path, directory: Path) -> dict[str, Any]:
    """`demo_outputs/`: `answers.json` and `answers.md`. A complete directory is left untouched."""
    key = {
        "version": RESULTS_VERSION,
        "models": [directory_identity(base), directory_identity(tuned)],
        "recipe": recipe.model_dump(mode="json", include={"demo", "generation", "prompt"}),
    }
    if read_manifest(directory, key):
        log.info("report: answers are complete")
    else:
        questions = recipe.demo.questions
        texts = {
            name: answer(load_chat_model(path), recipe.prompt, questions, recipe.generation, len(questions)).texts
            for name, path in (("base", base), ("tuned", tuned))
        }
        rows = [
            {"question": q, "base": b, "tuned": t}
            for q, b, t in zip(questions, texts["base"], texts["tuned"], strict=True)
        ]
        with publish(directory, key, {"num_questions": len(questions)}) as partial:
            write_json(partial / "answers.json", {"answers": rows, "generation": recipe.generation.model_dump()})
            write_text(partial / "answers.md", answers_markdown(rows))
        log.info("report: %d questions answered by base and tuned", len(questions))
    return dict(read_json(directory / "answers.json"))


def answers_markdown(rows: list[dict[str, str]]) -> str:
    """The answers as indented blocks, so that no model text is taken for Markdown."""

    def block(text: str) -> str:
        return "\n".join(f"    {line}" for line in text.splitlines()) or "    (empty)"

    parts = [f"## {r['question']}\n\nBase:\n\n{block(r['base'])}\n\nTuned:\n\n{block(r['tuned'])}\n" for r in rows]
    return "# Demo answers\n\n" + "\n".join(parts)

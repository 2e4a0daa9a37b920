"""Judge the evaluation by the recipe's rules. The task itself succeeds, so that the verdict is kept as an artifact."""

from kfp import dsl
from kfp.dsl import Artifact, Markdown, Output

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def promotion_gate(run: str, evaluation: str, verdict: Output[Artifact], page: Output[Markdown]) -> str:
    """Return `pass` or `fail`; write the verdict as an artifact, as JSON and as a page."""
    from pathlib import Path

    from tailtune.files import write_json
    from tailtune.gate import judge_file, verdict_markdown
    from tailtune.log import step
    from tailtune.owner import own_run
    from tailtune.skip_unchanged import record_promotion

    with step("gate"):
        this = own_run(run)
        judged = judge_file(this.recipe, Path(evaluation), this.verdict_path)
        write_json(Path(verdict.path), judged)
        Path(page.path).write_text(verdict_markdown(judged), encoding="utf-8")
        record_promotion(this, passed=judged["passed"])
        return "pass" if judged["passed"] else "fail"

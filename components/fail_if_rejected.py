"""Fail a run whose model did not pass the gate; the last line of its log is the verdict."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def fail_if_rejected(run: str, report: str) -> None:
    """Fail, after the report has been written."""
    from tailtune.gate import raise_verdict
    from tailtune.log import step
    from tailtune.owner import own_run

    with step("gate"):
        raise_verdict(own_run(run).verdict_path, report)

"""Delete what is left of a run's training jobs after somebody has ended the run."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def stop_jobs(job_id: str) -> None:
    """Delete the jobs of this pipeline run, unless it failed by itself: they then keep training."""
    from tailtune.jobs.cleanup import NotAllowedToListError, end_of_run
    from tailtune.jobs.kubernetes import KubernetesClient
    from tailtune.log import log, step

    with step("stop"):
        try:
            deleted, going_on = end_of_run(KubernetesClient(), job_id)
        except NotAllowedToListError as error:  # an account that may not list jobs could not create one either
            log.info("stop: there is no job to delete: %s", error.problem)
            return
        for name in deleted:
            log.info("stop: job %s was left over and is deleted", name)
        for name in going_on:
            log.info("stop: job %s goes on training; python pipeline.py --retry %s follows it again, and "
                     "python pipeline.py --cancel %s ends it", name, job_id, job_id)  # fmt: skip

"""Delete what is left of a run's training jobs, whether the run succeeded or failed."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def stop_jobs(job_id: str) -> None:
    """Delete the jobs of this pipeline run that have not ended, but not those of another run with the same name."""
    from tailtune.jobs.cleanup import NotAllowedToListError, cancel
    from tailtune.jobs.kubernetes import KubernetesClient
    from tailtune.log import log, step

    with step("stop"):
        try:
            for name in cancel(KubernetesClient(), pipeline_run=job_id):
                log.info("stop: job %s was left over and is deleted", name)
        except NotAllowedToListError as error:  # an account that may not list jobs could not create one either
            log.info("stop: there is no job to delete: %s", error.problem)

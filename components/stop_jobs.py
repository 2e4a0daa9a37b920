"""Delete what is left of a run's training jobs, whether the run succeeded or failed."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def stop_jobs(job_id: str) -> None:
    """Delete the jobs of this pipeline run that have not ended, but not those of another run with the same name."""
    from tailtune.jobs.cleanup import cancel
    from tailtune.jobs.kubernetes import KubernetesClient
    from tailtune.log import log, step

    with step("stop"):
        for name in cancel(KubernetesClient(), pipeline_run=job_id):
            log.info("stop: job %s was left over and is deleted", name)

"""When a run has succeeded or failed, leave no training job of it behind."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def stop_jobs(job_id: str) -> None:
    """Delete the jobs of this run of the pipeline that have not ended; not those of another run of the same name."""
    from tailtune.jobs.cleanup import cancel
    from tailtune.jobs.kubernetes import KubernetesClient
    from tailtune.log import log, step

    with step("stop"):
        for name in cancel(KubernetesClient(), pipeline_run=job_id):
            log.info("stop: job %s was still there and is deleted", name)

"""However a run ends, leave no training job of it behind."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def stop_jobs(run_name: str, job_id: str) -> None:
    """Delete the jobs of the run that have not ended. The run itself goes by its name, else by its id."""
    from tailtune.jobs import cluster
    from tailtune.log import log, step

    with step("stop"):
        for name in cluster.cancel(run_name or job_id, cluster.Cluster()):
            log.info("stop: job %s was still there and is deleted", name)

"""Run training as a job: on this machine, or on a cluster as a PyTorchJob or TrainJob.

A job (`job.py`) is `python -m MODULE ARGS` in a number of nodes, each with a number of ranks. `train_step.py` turns a
recipe's stage into a job, and hands it to one of two back ends:

- `local.py` starts torchrun on this machine (`torchrun.py`).
- `follow.py` creates the job on a cluster, or adopts the one of an earlier attempt, and polls it until it has ended.
  `kubernetes.py` is the client, `objects.py` the jobs of a namespace, `pytorchjob.py` and `trainjob.py` the manifests
  of the two kinds, `pods.py` their pods, and `node.py` the command of each pod: torchrun again. `logs.py` reads the
  pods' logs, `progress.py` updates the dashboard, `failure.py` explains failures, and `cleanup.py` deletes orphaned
  jobs.
"""

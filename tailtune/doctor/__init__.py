"""The doctor: what would stop a run, on this machine and on a cluster. Changes nothing."""

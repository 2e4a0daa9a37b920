"""The fetch and model steps: bring the data files and the base model to the volumes, complete or not at all.

dataset.py        the data files, from paths, https://, s3:// or the hub
choice.py         which files of a directory or data set: configurations, splits, patterns
model.py          the base model: fetched from the hub, used in place, or built small
small_model.py    builds a small model of the recipe's architecture, for runs without a download
hub.py            queries to the Hugging Face hub
transfer.py       receiving bytes: attempts, resuming, disk space, and errors in one line
certificates.py   an organisation's own certificates, for every client
"""

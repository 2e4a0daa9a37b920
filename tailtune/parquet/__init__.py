"""The parquet step: convert a source file of any supported format to `data.parquet`, and split it when it is read.

Each row of the source becomes one row of text columns, filled from the recipe's templates. Bad rows
are written to `rejects.jsonl` with the reason, and exact duplicates are removed.

- `write.py`: the step itself. Fills the columns, removes duplicates, writes and publishes the files.
- `readers.py`: detects the format and reads CSV and plain text.
- `json_reader.py`: reads JSON Lines and JSON arrays; `parquet_reader.py`: Parquet.
- `conversation.py`: checks conversations and gives them one form.
- `lines.py`: what the readers share. Numbers the lines, decides which rows are good, collects batches.
- `split.py`: splits the rows into train and validation.
"""

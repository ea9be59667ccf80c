"""Data: rows to text, text to tokens with the trained-on part marked, packed, cached, audited.

prepare     all of the below for a run: read this first
hub         data sets fetched from the hub; sources: rows of files and folders, streamed or not
mix         several sets, and how many rows of each; select: splits, and rows held out
formats     a row to text, by its columns; choose: which format; chat: by a chat template
tokenize    text to tokens, with the tokens that the loss is computed on
packing     rows packed into sequences; collate: sequences to tensors; stream: both for a stream
audit       what was counted, and what is wrong with it; show: both in a terminal
cache       tokens on disk, made once; inputs: files that a run needs and that are absent
"""

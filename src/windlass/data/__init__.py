"""Data: rows to text, text to tokens with the trained-on part marked, packed, cached, audited.

prepare     calls the stages, in the order of this list: read this first
select      the sets of a run and their rows; sources: their files; hub: fetches them; reading: rows of files
formats     a row to text, by its columns; choose: by which format; chat: through a chat template
tokenize    text to tokens, with those that the loss is computed on; documents: all of them, joined and held out
packing     documents packed into rows and written; collate: rows to tensors; stream: both for a stream
audit       what was counted, and what is wrong with it; show: both in a terminal
cache       tokens on disk, made once; inputs: what they are made of, and what is absent
"""

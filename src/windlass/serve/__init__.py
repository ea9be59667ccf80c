"""Serving: prove that a server answers with the exported adapter.

servers     what each server does with each kind of module: the table of servers.toml
probe       what a server's answers are compared with: log-probabilities of base, adapter and parts of the adapter
rows        the rows of a probe, and their chats; hypotheses: compute it, for everything that a server may compute
verify      compare a server's answers with a probe; client: the requests
"""

"""The model in every rank: loaded exactly, sharded, adapted, kept in step."""

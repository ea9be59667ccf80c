"""What goes wrong while a run trains: detected in the run folder's files, logged, and acted on."""

"""Studies of several runs: a paper's models, seeds, checkpoints; planned, run, resumed and read together."""

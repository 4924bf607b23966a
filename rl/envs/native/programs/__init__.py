"""Environments whose model writes programs. They run in rl/envs/sandbox, so all are of kind "replayed"."""

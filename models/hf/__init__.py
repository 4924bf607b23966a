"""Reads and writes Hugging Face checkpoints: `load`, `save`, `read_config`."""

from models.hf.checkpoint import check, load, read_config, save

__all__ = ["check", "load", "read_config", "save"]

"""Reads and writes Hugging Face checkpoints."""

from models.hf.checkpoint import check_new, load, open_reader, read_config, save
from models.hf.tensor_check import check

__all__ = ["check", "check_new", "load", "open_reader", "read_config", "save"]

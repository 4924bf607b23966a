"""Finds the devices of this process. JAX alone uses the CPU, in silence, if an accelerator is in use by another process or broken."""

import importlib.util
import logging
from typing import Any

import jax

REMEDY = "end the process that uses it, if there is one, or set JAX_PLATFORMS=cpu to run on the CPU"


def devices() -> list[Any]:
    """Returns `jax.devices()`. Raises ValueError in one line if this machine or JAX_PLATFORMS has an accelerator that JAX cannot use.

    An accelerator whose plugin is not installed is only a line in the log.
    """
    logger = logging.getLogger("jax._src.xla_bridge")
    heard, level = _Heard(), logger.level
    logger.addFilter(heard)
    logger.setLevel(logging.INFO)
    try:
        found = jax.devices()
    except RuntimeError as error:
        raise ValueError(f"{_line(error)}; {REMEDY}") from error
    finally:
        logger.removeFilter(heard)
        logger.setLevel(level)
    for text in heard.warnings:
        if text.startswith("CUDA backend failed to initialize"):
            raise ValueError(f"{_line(text)}; {REMEDY}")
        if text.startswith("A Google TPU may be present") and importlib.util.find_spec("libtpu"):
            raise ValueError(f"{_line(heard.failures.get('tpu', text))}; {REMEDY}")
        logger.warning(text)
    return found


class _Heard(logging.Filter):
    """Keeps the messages of JAX about backends: {platform: error} of those that failed, and warnings."""

    def __init__(self):
        super().__init__()
        self.failures: dict[str, str] = {}
        self.warnings: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Records a message of JAX; returns True for errors alone, which are shown."""
        text = record.getMessage()
        if text.startswith("Unable to initialize backend '"):
            self.failures[text.split("'")[1]] = text
        elif record.levelno == logging.WARNING:
            self.warnings.append(text)
        return record.levelno > logging.WARNING


def _line(error: object) -> str:
    return " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0].rstrip(".")

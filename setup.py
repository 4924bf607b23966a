"""Reads the package's dependencies from requirements.txt, so that both ways to install bring the same ones.

requirements.txt names the stand-in for seqio by a relative path, which package metadata does not allow. Here it becomes
the absolute URL of that folder in the checkout. All else about the package is in pyproject.toml.
"""

import pathlib

import setuptools

ROOT = pathlib.Path(__file__).resolve().parent


def requirements() -> list[str]:
    """Returns the lines of requirements.txt as package metadata spells them."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    return [f"seqio @ {(ROOT / line).as_uri()}" if line.startswith("./") else line for line in lines if line]


setuptools.setup(install_requires=requirements())

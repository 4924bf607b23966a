import importlib.util
import sys

if importlib.util.find_spec("jax") is None:
    remedy = "activate the environment of the installation, or pip install -r requirements.txt"
    sys.exit(f"error: {sys.executable} has no module 'jax'; {remedy}")

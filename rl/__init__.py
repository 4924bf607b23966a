import importlib.util
import sys

if "jax" not in sys.modules and importlib.util.find_spec("jax") is None:
    remedy = "activate the environment of the installation, or pip install -r requirements.txt"
    sys.exit(f"error: {sys.executable} has no module 'jax'; {remedy}")

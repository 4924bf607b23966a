import importlib.util
import sys

if "jax" not in sys.modules and importlib.util.find_spec("jax") is None:
    found = f"{sys.executable} has no module 'jax'"
    remedy = "activate the environment of the installation, or pip install -r requirements.txt"
    if sys.argv[:1] == ["-m"]:  # Python looks for the module of a command
        sys.exit(f"error: {found}; {remedy}")
    raise ModuleNotFoundError(f"{found}; {remedy}", name="jax")

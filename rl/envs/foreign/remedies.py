"""Names the remedy for an error in the code of a foreign environment, as far as its text shows a need."""

import re

_PACKAGE = re.compile("ModuleNotFoundError|ImportError")
_KEY = re.compile(r"(?i)api[ _]?key|missing ?key|credential|unauthorized|\b[A-Z0-9]+_(KEY|TOKEN)\b")
_NETWORK = re.compile(
    r"(?i)connect(ion)?[ _]?(error|timeout|refused|attempts)|couldn't reach|unreachable|name resolution|"
    "not resolve|max retries|urlerror|proxyerror|localentrynotfound|offline ?mode"
)


_DATA = re.compile(
    r"(?i)nltk[._ ]|resource \S+ not found|(file|directory)NotFoundError|no such file|\.download\(|can't find model"
)
_FETCHED = (
    "it needs data that is not on this machine, and fetches none in a run: connect this machine and download it once "
    "(for NLTK: python -m nltk.downloader NAME), or name a copy in env.options"
)


def of_load(error: str) -> str:
    """Returns the remedy for an error of an environment's loader."""
    if _DATA.search(error):
        return _FETCHED
    if _PACKAGE.search(error):
        return "install the package that it imports (python -m rl.envs install NAME --requirement ...)"
    if _NETWORK.search(error):
        return (
            "it fetches data from the network, which does not answer here: connect this machine, fill Hugging Face's cache, "
            "or name a data set of this machine in env.options"
        )
    if "env.options" in error:
        return ""  # it has its own
    if _KEY.search(error):
        return "it needs a key of a service: install it with --variable NAME=VALUE, and with --kind recorded if episodes use it"
    return "correct env.options, or install its requirements (python -m rl.envs install)"


def of_episode(error: str) -> str:
    """Returns the remedy for an error in an episode, or "" if it shows no need of data, the network, or a key."""
    if _DATA.search(error):
        return _FETCHED
    if _NETWORK.search(error) or _KEY.search(error):
        return (
            "an isolated episode reaches its model and nothing else: if the environment needs a service, install it with --kind recorded "
            "(and --variable NAME=VALUE for a key); strangers cannot run it then"
        )
    return ""

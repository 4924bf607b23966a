"""Messages of other threads to the scheduler's thread, besides requests: new weights, and functions to call."""

import concurrent.futures
import dataclasses
from collections.abc import Callable

import jax

from models import transformer


@dataclasses.dataclass(eq=False)
class Update:
    """New weights that wait until no request pinned to the old ones runs, or until `deadline_s`."""

    params: transformer.Params | Callable[[transformer.Params], transformer.Params]
    version: int
    epoch: int
    deadline_s: float
    future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)


@dataclasses.dataclass(eq=False)
class Action:
    """A function that the scheduler's thread calls between two decode calls."""

    function: Callable[[], object]
    future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)

    def run(self, version: int) -> None:
        """Calls the function unless the future was cancelled, and sets the future to the policy version in use, or to the error."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.function()
        except (ValueError, KeyError) as error:
            self.future.set_exception(error)
        except jax.errors.JaxRuntimeError as error:  # no memory for the decode state
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(version)

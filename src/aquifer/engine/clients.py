"""Clients: who requests are for, and how many tokens each was served."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from aquifer.engine.step_input import StepInput


class Clients:
    """Clients by number, with a virtual token counter for each.

    Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithm 2. A token that
    is run counts one, and so does a token that is sampled: a token of a prompt counts one together,
    and a token of the output two, as in the paper. Tokens that were cached are not run, and do not
    count.

    There are as many clients as API keys, and at least one; none is ever forgotten.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._served = np.zeros(0)  # tokens, by client

    def __len__(self) -> int:
        """How many clients have sent requests so far."""
        return len(self._numbers)

    def number(self, name: str) -> int:
        """The number of a client; a new one gets the next number."""
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self._served):
            self._served = np.append(self._served, 0.0)
        return number

    @property
    def served_tokens(self) -> npt.NDArray[np.float64]:
        """The counter of each client, [number of clients]."""
        return self._served

    def arrive(self, client: int, active: Iterable[int]) -> None:
        """A client without requests sends one; it may not have saved up what it did not use.

        Its counter is raised to the least of the others'.

        Args:
            client: the client.
            active: the clients that have requests.
        """
        least = min([float(self._served[other]) for other in active], default=0.0)
        self._served[client] = max(float(self._served[client]), least)

    def charge(self, step: StepInput, client_of_slot: npt.NDArray[np.int64]) -> None:
        """Count the tokens of a step that is planned.

        Args:
            step: the step.
            client_of_slot: the client of the sequence in each slot, [number of slots].
        """
        if len(self._served) == 1:
            self._served[0] += step.spans.num_tokens + len(step.sampled)
            return
        clients, num = client_of_slot[step.spans.slots], len(self._served)
        self._served += np.bincount(clients, weights=step.spans.counts, minlength=num)
        self._served += np.bincount(clients[step.sampled], minlength=num)

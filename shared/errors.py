"""Errors that a caller may meet, each with a text written for the person who reads it.

HeadraceError
├── SettingsError            an option or variable is wrong, or something needed is not installed
├── ServerUnavailable        Redis can't be reached
├── InputError               an input file can't be read or is refused as a whole
│   └── DuplicateIds         the same id stands twice in one input
├── InvalidRequest           one request is wrong; others are not affected
├── BatchExists / BatchNotFound / JobNotFound
├── ResultTimeout            no result within the time asked for (also a TimeoutError)
├── ModelError               a model can't be found, fetched, read or run
└── EngineFailure            a worker's engine fails or hangs; the process is to be started anew
"""


class HeadraceError(Exception):
    """Base of all errors that headrace raises on purpose. `exit_code` is that of a command which it ends."""

    exit_code = 2


class SettingsError(HeadraceError):
    """An option or environment variable is wrong, or a needed part is not installed."""


class ServerUnavailable(HeadraceError):
    """The Redis server can't be reached or refuses us."""


class InputError(HeadraceError):
    """An input can't be read, or is refused as a whole before anything is sent."""


class DuplicateIds(InputError):
    """The same request id stands twice in one input."""


class InvalidRequest(HeadraceError):
    """One request is malformed. `param` names the field at fault, if it is one field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BatchExists(HeadraceError):
    """A batch of this name is on the server already."""


class BatchNotFound(HeadraceError):
    """No batch of this name is on the server (or it has expired)."""


class JobNotFound(HeadraceError):
    """No job of this id is on the server (or it has expired)."""


class ResultTimeout(HeadraceError, TimeoutError):
    """The result did not arrive within the time asked for."""


class EngineFailure(HeadraceError):
    """A worker's engine fails whatever it runs, or hangs. Its jobs are handed back; a supervisor should restart it."""

    exit_code = 3


class ModelError(HeadraceError):
    """A model can't be found, fetched, read or run."""

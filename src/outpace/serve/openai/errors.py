"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from outpace.core.faults import ModelFault
from outpace.errors import ConfigError, ModelLoadError, OutpaceError, ProcessLost

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""OpenAI's name for the kind of error that each status means."""

OF_SERVER = (ModelFault, ConfigError, ModelLoadError)
"""Errors that end a text and are no client's doing."""


class ApiError(Exception):
    """An answer other than the one that was asked for.

    param: the field of the body that caused it, as a path such as ``messages[0].role``.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Returns the answer to a client for an error that ended its text.

        What is not the client's doing comes without details, which are in the log.
        """
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ProcessLost):
            return cls(503, str(error), code="process_lost")
        if isinstance(error, OutpaceError) and not isinstance(error, OF_SERVER):
            return cls(400, str(error))
        return cls(500, "the server failed on this request; its log says why.", code="internal")

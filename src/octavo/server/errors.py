"""Errors over HTTP, in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

from typing import Any

from octavo.errors import OctavoError
from octavo.types import RequestError

# What a refusal by the engine means over HTTP: (status, seconds after which trying again may help). All others are 400.
_STATUS = {
    "queue_full": (429, 1),
    "queue_tokens_full": (429, 1),
    "queue_timeout": (503, 1),
    "draining": (503, 5),
    "engine_dead": (503, 5),
    "slow_reader": (408, None),
    "engine_error": (500, None),
}

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(OctavoError):
    """An answer that is no success. `retry_after`: seconds, sent as a header; None: trying again does not help."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type or _TYPES.get(status, "server_error")
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def from_code(code: str, message: str, param: str | None = None) -> ApiError:
    """What the engine calls `code`, over HTTP."""
    status, retry_after = _STATUS.get(code, (400, None))
    return ApiError(status, message, code=code, param=param, retry_after=retry_after)


def from_engine(error: OctavoError) -> ApiError:
    """A refusal or failure of the engine as an answer. A model that cannot do what is asked is the client's to know."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        # What the engine calls a structure, clients ask for as a response format.
        return from_code(error.code, str(error), "response_format" if error.field == "structure" else error.field)
    return ApiError(400, str(error), code="unsupported")

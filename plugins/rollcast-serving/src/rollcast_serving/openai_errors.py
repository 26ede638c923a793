"""Errors in the format of OpenAI's API: every answer that is not a success has a JSON body."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from rollcast.errors import CapabilityError, RendererError, RequestError, RolloutError, SessionEnded

__all__ = ["ApiError", "answer_errors", "error_response", "model_not_found"]

logger = logging.getLogger(__name__)

_INVALID = "invalid_request_error"
_CODES = {404: "unknown_url", 405: "method_not_supported", 413: "request_too_large"}


class ApiError(RequestError):
    """A request that is refused, with the fields of the API's error object.

    Args:
        message: reason, and what to do about it.
        param: parameter at fault; None if the whole request is.
        code: the API's short name of the fault.
        status: HTTP status.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def model_not_found(name: str, served: tuple[str, ...]) -> ApiError:
    """Return the error of a request for a model that the endpoint does not serve."""
    models = ", ".join(repr(model) for model in served)
    message = f"the model {name!r} does not exist; this endpoint serves {models}"
    return ApiError(message, "model", "model_not_found", 404)


def error_response(
    status: int, message: str, kind: str, code: str | None = None, param: str | None = None
) -> web.Response:
    """Return an error in the format of OpenAI's API."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return web.json_response({"error": error}, status=status)


async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return the handler's response, or its error in the API's format."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error.status, str(error), _INVALID, error.code, error.param)
    except (RequestError, RendererError, CapabilityError, UnicodeError, RecursionError) as error:
        return error_response(400, str(error) or type(error).__name__, _INVALID)
    except SessionEnded as ended:
        code = "context_length_exceeded" if ended.end == "length" else f"session_{ended.end}"
        return error_response(400, str(ended), _INVALID, code)
    except RolloutError as error:
        return error_response(503, str(error), "engine_error")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{error.reason}: {request.method} {request.path}"
        return error_response(error.status, message, _INVALID, _CODES.get(error.status))
    except ConnectionError:
        raise  # the client is gone
    except Exception:
        logger.exception("a request to %s failed", request.path)
        return error_response(500, "the server failed to answer; its log has the cause", "server_error")

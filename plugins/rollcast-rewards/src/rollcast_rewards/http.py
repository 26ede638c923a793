"""The reward ``http``, which requests the score of a sample from a server.

The server gets a POST request with the JSON object ``{"prompt", "response", "ground_truth",
"data_source", "finished", "extra_info"}``, and answers with a number, or with an object that has
``score`` and may have ``acc`` (true if the answer is correct) and further numbers.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.function import result_from_mapping
from rollcast_rewards.remote import TransientError

__all__ = ["HttpReward"]

_KEY = "reward.reward_kwargs"
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_MOST_BYTES = 1 << 20


class HttpReward(BaseReward):
    """A reward that requests scores from a server; the manager ``remote`` sends many requests at once.

    Args:
        url: http or https address.
        headers: further request headers.
        timeout_s: limit of one request, in seconds.
        max_score: score of a correct answer, if the server does not send ``acc``.

    Raises:
        ConfigError: the address is not http or https, or the time limit is not positive.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 10.0, max_score: float = 1.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{_KEY}.url is {url!r}; it has to start with http:// or https://")
        if not timeout_s > 0:
            raise ConfigError(f"{_KEY}.timeout_s is {timeout_s}; it has to be above 0")
        self._url = url
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout_s = timeout_s
        self.max_score = max_score

    def score(self, sample: RewardSample) -> float | RewardResult:
        """Return the score in the server's response.

        Raises:
            TransientError: the server could not be reached or is busy; a retry may succeed.
            RewardError: the server rejected the request, or its response is not a score.
        """
        text = self._post(_encode(sample))
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise RewardError(f"{self._url} gave {text[:100]!r}, which is not JSON") from error
        if isinstance(answer, Mapping):
            return result_from_mapping(answer)
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            raise RewardError(f"{self._url} gave {text[:100]!r}, which is neither a number nor an object with 'score'")
        return answer

    def _post(self, body: bytes) -> str:
        # __init__ has checked that the scheme is http or https.
        request = urllib.request.Request(self._url, body, self._headers, method="POST")  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:  # noqa: S310
                data = response.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(200).decode("utf-8", "replace")
            message = f"{self._url} answered {error.code} {error.reason}: {detail}"
            if error.code not in _TRANSIENT:
                raise RewardError(message) from error
            transient = TransientError(message)
            transient.retry_after_s = _seconds(error.headers.get("Retry-After"))
            raise transient from error
        except OSError as error:
            raise TransientError(f"{self._url}: {getattr(error, 'reason', error)}") from error
        return str(data.decode("utf-8", "replace"))


def _encode(sample: RewardSample) -> bytes:
    content: dict[str, Any] = {
        "prompt": sample.prompt,
        "response": sample.response,
        "ground_truth": sample.ground_truth,
        "data_source": sample.data_source,
        "finished": sample.finished,
        "extra_info": dict(sample.extra_info),
    }
    # Values without a JSON form (numpy's scalars, dates) are sent as text.
    return json.dumps(content, default=str).encode()


def _seconds(text: str | None) -> float | None:
    try:
        return max(float(text), 0.0) if text else None
    except ValueError:  # a date, which few servers send
        return None

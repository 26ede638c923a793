"""Rewards behind a server: a real one, on this machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample, RewardSettings
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.http import HttpReward
from rollcast_rewards.remote import RateLimit, RemoteRewardManager, TransientError


class Server(ThreadingHTTPServer):
    """Answers as ``give`` says, and counts how many requests it has at a time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, give: Callable[[dict[str, Any]], tuple[int, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.give = give
        self.lock = threading.Lock()
        self.now = self.most = self.total = 0
        self.headers_seen: list[dict[str, str]] = []
        self.retry_after: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        server = self.server
        with server.lock:
            server.now += 1
            server.total += 1
            server.most = max(server.most, server.now)
            server.headers_seen.append(dict(self.headers.items()))
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = server.give(body)
        with server.lock:
            server.now -= 1
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        if status != 200 and server.retry_after is not None:
            self.send_header("Retry-After", server.retry_after)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def serve(give: Callable[[dict[str, Any]], tuple[int, Any]]) -> Server:
        server = Server(give)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        running.append(server)
        return server

    yield serve
    for server in running:
        server.shutdown()
        server.server_close()


def samples(count: int) -> list[RewardSample]:
    return [
        RewardSample("2+2=", f"{index}", ground_truth=index, data_source="sums", extra_info={"level": 1})
        for index in range(count)
    ]


def test_the_server_sees_the_sample_and_its_answer_is_the_score(serve: Callable[..., Server]) -> None:
    bodies = []

    def give(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return 200, {"score": 0.5, "acc": True, "level": 3, "note": "fine"}

    server = serve(give)
    reward = HttpReward(server.url, headers={"Authorization": "Bearer x"})
    assert reward.score(samples(1)[0]) == RewardResult(0.5, True, {"level": 3.0})
    assert bodies == [
        {
            "prompt": "2+2=",
            "response": "0",
            "ground_truth": 0,
            "data_source": "sums",
            "finished": True,
            "extra_info": {"level": 1},
        }
    ]
    assert server.headers_seen[0]["Authorization"] == "Bearer x"
    assert server.headers_seen[0]["Content-Type"] == "application/json"


def test_many_at_a_time_but_no_more_than_allowed(serve: Callable[..., Server]) -> None:
    def give(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.02)
        return 200, float(body["ground_truth"])

    server = serve(give)
    results = RemoteRewardManager(HttpReward(server.url), max_concurrent=4)(samples(40))
    assert [result.score for result in results] == [float(index) for index in range(40)]
    assert 1 < server.most <= 4
    assert server.total == 40


def test_a_busy_server_is_asked_again(serve: Callable[..., Server]) -> None:
    tries: dict[int, int] = {}

    def give(body: dict[str, Any]) -> tuple[int, Any]:
        index = body["ground_truth"]
        tries[index] = tries.get(index, 0) + 1
        return (200, 1.0) if tries[index] > index else (503, "busy")

    server = serve(give)
    server.retry_after = "0.01"
    results = RemoteRewardManager(HttpReward(server.url), RewardSettings("zero", 0.5), max_retries=2, backoff_s=60)(
        samples(4)
    )
    assert [result.score for result in results] == [1.0, 1.0, 1.0, 0.0]
    assert tries == {0: 1, 1: 2, 2: 3, 3: 3}
    assert "503" in results[3].error
    assert "busy" in results[3].error


def test_a_refusal_is_final(serve: Callable[..., Server]) -> None:
    server = serve(lambda body: (400, "no such task"))
    with pytest.raises(RewardError, match=r"(?s)answered 400 .*no such task.*sample 0 of 1"):
        RemoteRewardManager(HttpReward(server.url), max_retries=5)(samples(1))
    assert server.total == 1


@pytest.mark.parametrize("answer", ["not JSON", '"1.0"', "true", "[1]", '{"value": 1}'])
def test_answers_that_are_no_score(serve: Callable[..., Server], answer: str) -> None:
    server = serve(lambda body: (200, answer))
    with pytest.raises(RewardError):
        HttpReward(server.url).score(samples(1)[0])


def test_a_server_that_hangs_or_is_gone(serve: Callable[..., Server]) -> None:
    gate = threading.Event()

    def give(body: dict[str, Any]) -> tuple[int, Any]:
        if body["ground_truth"] == 3:
            gate.wait(60)
        return 200, 1.0

    server = serve(give)
    manager = RemoteRewardManager(
        HttpReward(server.url, timeout_s=60), RewardSettings("drop", timeout_s=1.0), max_concurrent=2
    )
    results = manager(samples(30))
    gate.set()
    assert [index for index, result in enumerate(results) if result.dropped] == [3]
    assert "took longer than reward.timeout_s = 1 s" in results[3].error
    reward = HttpReward(server.url, timeout_s=2)
    server.shutdown()
    server.server_close()
    with pytest.raises(TransientError, match="Connection refused"):
        reward.score(samples(1)[0])


def test_calls_keep_their_distance() -> None:
    """Places in the row are handed out at the pace, whoever takes them; nobody has to sleep to see it."""
    limit = RateLimit(per_minute=60)
    waits = [limit.reserve() for _ in range(10)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[9] > 8.0  # nine seconds, less what the ten calls took
    assert waits[9] <= 9.0
    assert [RateLimit(None).reserve() for _ in range(3)] == [0.0, 0.0, 0.0]


def test_the_manager_keeps_the_pace(serve: Callable[..., Server]) -> None:
    times: list[float] = []

    def give(body: dict[str, Any]) -> tuple[int, Any]:
        times.append(time.monotonic())
        return 200, 1.0

    server = serve(give)
    start = time.monotonic()
    RemoteRewardManager(HttpReward(server.url), max_concurrent=8, max_rpm=1200)(samples(11))
    # Ten intervals of 50 ms lie between the first call and the last, however slow the machine is.
    assert times[-1] - start >= 0.5


class Flaky(BaseReward):
    """A user's own client, which raises what clients raise."""

    def __init__(self) -> None:
        self.calls = 0

    def score(self, sample: RewardSample) -> float:
        self.calls += 1
        if self.calls < 3:
            raise TimeoutError("read timed out")
        return 1.0


def test_any_reward_that_waits_for_a_network_is_tried_again() -> None:
    reward = Flaky()
    (result,) = RemoteRewardManager(reward, backoff_s=0.01)(samples(1))
    assert (result.score, reward.calls) == (1.0, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_concurrent": 0}, "max_concurrent is 0"),
        ({"max_rpm": -1}, "max_rpm is -1"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"backoff_s": -1}, "backoff_s is -1"),
    ],
)
def test_options_out_of_their_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RemoteRewardManager(Flaky(), None, **options)


def test_addresses_that_are_none() -> None:
    with pytest.raises(ConfigError, match="it has to start with http"):
        HttpReward("file:///etc/passwd")
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        HttpReward("http://localhost", timeout_s=0)

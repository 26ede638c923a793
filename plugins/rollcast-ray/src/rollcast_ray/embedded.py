"""An embedded Ray, private to this process and not reachable by other machines and users.

If Ray breaks, its processes are killed without using Ray.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import ray

from rollcast.contracts.command import exit_code
from rollcast.errors import ResourceError
from rollcast_ray.machine import check_temp_dir, default_object_store
from rollcast_ray.ray_internals import (
    AUTHENTICATION_LOGGER,
    forget_authentication,
    loopback_only,
    restore_excepthook,
    skip_shutdown_at_exit,
    started_processes,
)

__all__ = ["EmbeddedRay", "drop_own_token", "loopback_environment"]

logger = logging.getLogger(__name__)

#: Environment for small or busy machines: workers at nice 15 starve in collectives, and usage statistics need a
#: network. Freed objects are released at once instead of once a second, so that the next batch reuses mapped memory,
#: which is ten times as fast as new pages.
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_free_objects_batch_size": "1",
}
#: Variable with Ray's authentication mode; a user's ``disabled`` is respected.
_AUTH_MODE = "RAY_AUTH_MODE"
_TOKEN_KEYS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: Authentication token of this process, never written to a file. It cannot change, because Ray's native code caches it.
_TOKEN = secrets.token_hex(32)
#: Logger that warns at each start that a local Ray requires a token, which is intended.
_auth_logger = logging.getLogger(AUTHENTICATION_LOGGER)
#: Processes without which the embedded Ray cannot answer.
_VITAL = ("gcs_server", "raylet")
_REAPER = Path(__file__).with_name("_reaper.py")
_LOOK_S = 0.25
_END_GRACE_S = 1.0
#: Exit code of a program without a rollcast command whose Ray broke, the same as for a failed command.
_EXIT_BROKEN = 2


def loopback_environment(node: str) -> dict[str, str]:
    """Return variables that keep collectives on loopback, for a process on a node that is reached by loopback only."""
    if not node.startswith("127.") and node != "::1":
        return {}
    interface = "lo" if sys.platform.startswith("linux") else "lo0"
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, "VLLM_HOST_IP": node}
    return {key: value for key, value in wanted.items() if key not in os.environ}


def drop_own_token() -> None:
    """Drop the token of an earlier embedded Ray, because another cluster could not call this process with it."""
    if os.environ.get("RAY_AUTH_TOKEN") == _TOKEN:
        del os.environ["RAY_AUTH_TOKEN"]
        forget_authentication()


class EmbeddedRay:
    """The Ray processes started by this process, and a monitor of them."""

    def __init__(self) -> None:
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._vital: dict[str, subprocess.Popen[bytes]] = {}
        self._broken = ""
        self._leaving: threading.Thread | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    def start(
        self,
        num_cpus: int | None,
        object_store_memory: int | None,
        log_to_driver: bool,
        include_dashboard: bool = False,
    ) -> None:
        """Start Ray on the loopback address, with a token known only to its own processes.

        Raises:
            ResourceError: the folder for temporary files is unsuitable for Ray, or the dashboard is not installed.
        """
        check_temp_dir()
        if include_dashboard and importlib.util.find_spec("aiohttp_cors") is None:
            raise ResourceError(
                "runtime.include_dashboard is true, but Ray's dashboard is not installed; install it with "
                'pip install "ray[default]", or set runtime.include_dashboard=false'
            )
        with _own_environment(), loopback_only():
            context = ray.init(
                address="local",  # otherwise Ray would join any Ray that is running on this machine
                num_cpus=num_cpus or os.cpu_count(),
                object_store_memory=object_store_memory or default_object_store(),
                include_dashboard=include_dashboard,
                dashboard_host="127.0.0.1",
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
            )
        if include_dashboard:
            logger.info("Ray's dashboard: http://%s", context.dashboard_url)
        atexit.register(self._exit_if_stuck)
        self.watch(started_processes())
        pids = [str(process.pid) for process in self._started.values()]
        self._reaper = subprocess.Popen(  # noqa: S603  # our own interpreter and file
            [sys.executable, str(_REAPER), *pids], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        """Monitor the processes of a Ray, given by their kind."""
        self._broken = ""
        self._started = dict(processes)
        self._vital = {name: self._started[name] for name in _VITAL if name in self._started}

    def broken(self) -> str:
        """Describe the vital processes that have ended; empty if all are alive, or if Ray is not embedded."""
        if not self._broken:
            ended = {name: process.poll() for name, process in self._vital.items()}
            described = [
                f"{name} (process {self._vital[name].pid}) {_describe_end(code)}"
                for name, code in ended.items()
                if code is not None
            ]
            self._broken = " and ".join(described)
        return self._broken

    def require_whole(self) -> None:
        """Check that Ray can answer; its own client would wait for a minute and then end this process.

        Raises:
            ResourceError: a vital process has ended; names the process.
        """
        if self.broken():
            raise ResourceError(f"the run's own Ray is gone: its {self.broken()}. Everything on it ends with it")

    @property
    def running(self) -> bool:
        """True from :meth:`start` to :meth:`end`."""
        return bool(self._vital)

    def forget(self) -> None:
        """Stop monitoring, because this Ray was ended elsewhere."""
        self._started, self._vital, self._broken = {}, {}, ""
        self._end_reaper()

    def _end_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
            if self._reaper.stdin is not None:
                self._reaper.stdin.close()
            self._reaper = None

    def end(self, stop: Callable[[], None]) -> None:
        """End Ray in order after calling ``stop``; kill its processes if it is broken or breaks meanwhile.

        Args:
            stop: function that ends the actors and groups on Ray, by calls to Ray.

        Raises:
            BaseException: any exception of ``stop``.
        """
        processes = _descendants(self._started)
        raised: list[BaseException] = []

        def run() -> None:
            try:
                stop()
            except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
                raised.append(error)

        if not self._is_ending():
            # In a separate thread, because calls to a Ray that breaks meanwhile return after a minute or never.
            stopping = threading.Thread(target=run, name="rollcast-ray-stop", daemon=True)
            stopping.start()
            while stopping.is_alive() and not self._is_ending():
                stopping.join(_LOOK_S)
        if self._is_ending():
            # A pending exception explains the failure; without one, _exit_if_stuck would exit without a message.
            if not raised and sys.exc_info()[1] is None and self.broken():
                logger.error("the run's own Ray broke before it was stopped: its %s", self.broken())
            self._end_without_help(processes)
        else:
            ray.shutdown()
        self._started, self._vital = {}, {}
        self._end_reaper()
        if raised:
            raise raised[0]

    def _is_ending(self) -> bool:
        # A signal to the whole process group ends the helpers at once, while the vital processes shut down in order.
        return any(process.poll() is not None for process in self._started.values())

    def _end_without_help(self, processes: set[psutil.Process]) -> None:
        restore_excepthook()
        processes |= _descendants(self._started)
        for process in processes:
            if process.is_running():
                process.kill()
        for process in self._started.values():
            process.wait(_END_GRACE_S)  # otherwise the process stays a zombie
        # Disconnects this process, as far as that works without Ray.
        self._leaving = threading.Thread(target=ray.shutdown, name="rollcast-ray-leave", daemon=True)
        self._leaving.start()
        self._leaving.join(_END_GRACE_S)
        if self._leaving.is_alive():
            skip_shutdown_at_exit()

    def _exit_if_stuck(self) -> None:
        # Ray's native threads crash an interpreter that ends while one of them waits for a Ray that has ended.
        if self._leaving is not None and self._leaving.is_alive():
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            code = exit_code()
            os._exit(_EXIT_BROKEN if code is None else code)


def _find(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants; empty if it no longer exists."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _descendants(started: Mapping[str, subprocess.Popen[bytes]]) -> set[psutil.Process]:
    return {process for parent in started.values() for process in _find(parent.pid)}


def _describe_end(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@contextmanager
def _own_environment() -> Iterator[None]:
    """Set the variables of an embedded Ray inside the block, without overriding variables that are already set."""
    added = {key: value for key, value in _ENVIRONMENT.items() if key not in os.environ}
    if not any(key in os.environ for key in (_AUTH_MODE, *_TOKEN_KEYS)):
        added["RAY_AUTH_TOKEN"] = _TOKEN
    mode, level = os.environ.get(_AUTH_MODE), _auth_logger.level
    os.environ.update(added)
    _auth_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _auth_logger.setLevel(level)
        # Keep the token: this process's native code has cached it, so a Ray that the user starts here next must use
        # the same token.
        for key in added.keys() - {"RAY_AUTH_TOKEN"}:
            os.environ.pop(key, None)
        if mode is None:
            os.environ.pop(_AUTH_MODE, None)  # Ray sets it for the processes that it starts

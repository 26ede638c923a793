"""SGLang's HTTP server as a child of a rollout: ``python -m rollcast_sglang.server``.

Standard input has one JSON object: ``args``, SGLang's ``ServerArgs`` by name, and ``parent``, the rollout's
process id. The arguments hold the API key, which a command line would show to every user of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

_POLL_S = 0.5


def _end_with_parent(parent: int) -> None:
    """Kill this process and all that it started once the rollout's process is gone."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    # The first ends the others, except Python's resource tracker, which removes their semaphores.
    os.killpg(0, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(args: dict[str, Any]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**args))


def main() -> None:
    """Serve until killed, or until the parent is gone."""
    spec = json.load(sys.stdin)
    threading.Thread(target=_end_with_parent, args=(int(spec["parent"]),), daemon=True).start()
    _serve(spec["args"])


# SGLang spawns its workers, which import this module under another name.
if __name__ == "__main__":
    main()

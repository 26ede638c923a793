"""SGLang's HTTP server as a child of a rollout: ``python -m rollcast_sglang.server``."""

from __future__ import annotations

from rollcast_serving.engines.server_process import read_spec


def main() -> None:
    """Serve until killed, or until the parent is gone."""
    args, listening = read_spec()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**args, **listening))


# SGLang spawns its workers, which import this module under another name.
if __name__ == "__main__":
    main()

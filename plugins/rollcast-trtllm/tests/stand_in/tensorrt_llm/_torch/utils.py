from __future__ import annotations


def get_device_uuid(device_id: int) -> str:
    return f"GPU-{device_id}"

"""Which GPUs of a node are joined by NVLink, by NVML's account."""

from __future__ import annotations


def nvlink_unmet(own: str, peer: str) -> str:
    """Why two GPUs, named by UUID, are not joined by NVLink; empty where they are, and for a GPU and itself.

    PCIe may map a peer's memory too, but promises nothing about a 16-byte store arriving whole.

    Raises:
        ImportError: nvidia-ml-py, which SGLang requires, is not installed.
        pynvml.NVMLError: the driver does not say.
    """
    if own == peer:
        return ""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in (own, peer)]
        status = pynvml.nvmlDeviceGetP2PStatus(*handles, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    finally:
        pynvml.nvmlShutdown()
    return "" if status == pynvml.NVML_P2P_STATUS_OK else f"no NVLink between {own} and {peer} (NVML's P2P status {status})"

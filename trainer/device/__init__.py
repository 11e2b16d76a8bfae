"""Devices, precision, batches on a device, seeds. Start with ``device``."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.trainer.device.device import CpuDevice as CpuDevice
    from offloop.trainer.device.device import Device as Device
    from offloop.trainer.device.device import GpuDevice as GpuDevice
    from offloop.trainer.device.device import get_device as get_device
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)

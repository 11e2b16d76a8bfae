"""Where numbers are computed, and how reproducibly: devices, precision, batches on a device, seeds.

May import: arguments. Begin with ``device``.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.trainer.device.device import CpuDevice, Device, GpuDevice, get_device

__all__ = ["CpuDevice", "Device", "GpuDevice", "get_device"]

__getattr__, __dir__ = lazy_exports(__name__, {"offloop.trainer.device.device": __all__})

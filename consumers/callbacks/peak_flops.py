"""The published performance of accelerators, for the model FLOPs utilisation."""

# Teraflops per second, dense: where a datasheet gives only the figure "with sparsity", half of it. 16 stands for
# float16 and bfloat16, which are equally fast where there are both. From NVIDIA's datasheets "B200 (HGX B200)", "H200
# Tensor Core GPU", "H100 Tensor Core GPU" (SXM, PCIe and NVL), "A100 Tensor Core GPU", "A30", "A10", "L40S", "L4",
# "V100" and "T4". The first entry whose words all occur in the device's name is taken, so the special ones stand
# before the general.
_TERAFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"fp32": 75, "tf32": 1125, "16": 2250, "fp8": 4500}),
    ("H200", {"fp32": 67, "tf32": 494.5, "16": 989.5, "fp8": 1979}),
    ("H100 PCIe", {"fp32": 51, "tf32": 378, "16": 756, "fp8": 1513}),
    ("H100 NVL", {"fp32": 60, "tf32": 417.5, "16": 835.5, "fp8": 1671}),
    ("H100", {"fp32": 67, "tf32": 494.5, "16": 989.5, "fp8": 1979}),
    ("A100", {"fp32": 19.5, "tf32": 156, "16": 312}),
    ("A30", {"fp32": 10.3, "tf32": 82, "16": 165}),
    ("A10", {"fp32": 31.2, "tf32": 62.5, "16": 125}),
    ("L40S", {"fp32": 91.6, "tf32": 183, "16": 362, "fp8": 733}),
    ("L4", {"fp32": 30.3, "tf32": 60, "16": 121, "fp8": 242.5}),
    ("V100 SXM2", {"fp32": 15.7, "fp16": 125}),
    ("V100 PCIe", {"fp32": 14, "fp16": 112}),
    ("T4", {"fp32": 8.1, "fp16": 65}),
)
_KIND = {"fp16": "16", "bf16": "16"}


def peak_flops(device_name: str | None, precision: str | None) -> float | None:
    """Floating point operations per second that a device is said to reach, or ``None`` for one that is not in the
    table.

    ``device_name`` as CUDA names it (``NVIDIA A100-SXM4-80GB``); ``precision`` is ``fp32``, ``tf32``, ``fp16``,
    ``bf16`` or ``fp8``, with or without ``amp_``. Reference: ``composer/callbacks/speed_monitor.py``.
    """
    if device_name is None or precision is None:
        return None
    kind = precision.lower().removeprefix("amp_")
    words = set(device_name.lower().replace("-", " ").split())
    for model, teraflops in _TERAFLOPS:
        if words.issuperset(model.lower().split()):
            figure = teraflops.get(kind, teraflops.get(_KIND.get(kind, kind)))
            return None if figure is None else figure * 1e12
    return None

"""Tensors as bytes of a safetensors file, see https://huggingface.co/docs/safetensors#format.

Eight bytes hold the length of a JSON header (little endian), which has each tensor's dtype, shape and offsets. The
tensors follow without holes. Nothing here needs torch, and only :meth:`TensorView.numpy` needs numpy. Small images are
in their events, others in shared memory, see ``docs/protocol.md``."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec

from offloop.bus.errors import ClosedError, ConfigurationError, ProtocolError
from offloop.bus.tensors.segments import SegmentElsewhereError, SegmentReference, open_segment

if TYPE_CHECKING:
    import numpy
    from typing_extensions import Buffer


INLINE_BYTES = 1 << 20  # largest image that is sent in its event, and recorded with it

VERSION = 1
MAX_HEADER = 100_000_000  # the format's own limit
MAX_TENSORS = 1 << 17
MAX_ELEMENTS = 1 << 22
MAX_DIMENSIONS = 64
MAX_BYTES = 1 << 48

_METADATA = "__metadata__"

# In the order of the format's library: it sorts by dtype, the widest first, then by name.
_BITS = {
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F32", "U32", "I32"), 32),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 16),
    **dict.fromkeys(("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8"), 8),
    "F4": 4,
    "BOOL": 8,
}
_RANKING = {dtype: place for place, dtype in enumerate(_BITS)}
_NUMPY = {
    **{f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "UI" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
    "C64": "<c8",
    "BOOL": "|b1",
}

Fetch = Callable[[Mapping[str, Any]], "Buffer"]
"""Fetches an image from another machine, see :func:`offloop.bus.tensors.segments.fetch_segment`."""


@dataclass(slots=True, eq=False, repr=False)
class TensorView:
    """One tensor of an image, without a copy; unusable after its :class:`Tensors` were closed.

    ``dtype`` is safetensors' name, such as ``"F32"``. ``data`` are its bytes, little endian and in C order, read-only
    in shared memory."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def numpy(self) -> "numpy.ndarray[Any, Any]":
        """Return the tensor as an array of the same memory; ``BF16``, which numpy lacks, as a float32 copy.

        An array kept after its event keeps the memory: copy it instead.

        Raises ConfigurationError: numpy has no such dtype."""
        import numpy

        if self.dtype == "BF16":
            halves = numpy.frombuffer(self.data, "<u2").astype("<u4")
            return (halves << 16).view("<f4").reshape(self.shape)
        if self.dtype not in _NUMPY:
            raise ConfigurationError(f"numpy has no dtype for {self.dtype}: use the bytes in .data")
        return numpy.frombuffer(self.data, _NUMPY[self.dtype]).reshape(self.shape)

    def __repr__(self) -> str:
        return f"<TensorView {self.dtype}{list(self.shape)}>"


class Tensors(Mapping[str, TensorView]):
    """Tensors of one image by name, in the order of their bytes; a context manager."""

    def __init__(
        self, image: memoryview, entries: Mapping[str, "_Entry"], metadata: Mapping[str, str], data: int
    ) -> None:
        self._image = image
        self._views = {
            name: TensorView(entry.dtype, entry.shape, image[slice(*(data + place for place in entry.data_offsets))])
            for name, entry in entries.items()
        }
        self._metadata = metadata
        self._closed = False

    @classmethod
    def from_image(cls, image: "Buffer") -> "Tensors":
        """Read an image; the tensors share its memory. Raise ProtocolError if it is malformed or exceeds a limit."""
        view = memoryview(image).cast("B")
        return cls(view, *_read_header(view))

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._metadata

    @property
    def image(self) -> memoryview:
        self._check()
        return self._image

    def __getitem__(self, name: str) -> TensorView:
        self._check()
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("these tensors are closed: copy them before their event is handled")

    def close(self) -> None:
        """Give up the memory; arrays, views and images in use keep it."""
        # Nothing is released that someone may still read: that would crash the process.
        self._closed = True
        self._views, self._image = {}, memoryview(b"")

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "<Tensors, closed>" if self._closed else f"<Tensors {', '.join(self._views)}>"


def is_tensors(value: Any) -> bool:
    return isinstance(value, dict) and "$tensors" in value


def open_tensors(value: Any, fetch: Fetch | None = None) -> Tensors:
    """Open the tensors of a field's value, in the event or in shared memory.

    Shared memory on another machine is read by ``fetch``, if given. Close them when the event is handled: the trainer
    reuses the memory only after that.

    Raises FieldNotAvailableError: they are gone; ProtocolError: the value or the image is malformed."""
    if not isinstance(value, dict) or value.get("$tensors") != VERSION:
        raise ProtocolError(f"a field's tensors are not a map of version {VERSION}: a newer offloop may have sent them")
    image, reference, size = value.get("image"), value.get("segment"), value.get("bytes")
    if isinstance(image, bytes):
        if size != len(image):
            raise ProtocolError(f"a field's tensors should have {size!r} bytes, but have {len(image)}")
        return Tensors.from_image(image)
    if not isinstance(reference, dict):
        raise ProtocolError("a field's tensors have neither an image nor a segment")
    segment = SegmentReference.from_wire(reference)
    if size != segment.size:
        raise ProtocolError(f"a field's tensors should have {size!r} bytes, but their segment has {segment.size}")
    try:
        return Tensors.from_image(open_segment(segment))
    except SegmentElsewhereError:
        if fetch is None:
            raise
        return Tensors.from_image(fetch(reference))


class ImageLayout(NamedTuple):
    """Layout of an image to be filled."""

    header: bytes  # first bytes of the image
    starts: dict[str, int]  # offset of each tensor after the header, in the order of their bytes
    size: int  # size of the whole image in bytes


class TensorPlaces(NamedTuple):
    """Positions of tensors after any header, computed once for many images.

    An image has the same bytes as a file of the format's library. Only metadata with several entries may differ in
    order, which is random in the library and the given one here."""

    entries: bytes  # their part of the header
    starts: dict[str, int]
    size: int

    def layout(self, metadata: Mapping[str, str] | None = None, align: int = 8) -> ImageLayout:
        """Return the layout with these strings. Data begin at a multiple of ``align``; 8 is the format's own."""
        parts = [] if metadata is None else [_inner_json({_METADATA: dict(metadata)})]
        text = b"{%b}" % b",".join([*parts, *filter(None, [self.entries])])
        text += b" " * (-(len(text) + 8) % align)
        if len(text) > MAX_HEADER:
            raise _too_large(len(self.starts), len(text))
        header = len(text).to_bytes(8, "little") + text
        return ImageLayout(header, self.starts, len(header) + self.size)


def tensor_places(specs: Mapping[str, tuple[str, Sequence[int]]]) -> TensorPlaces:
    entries: dict[str, Any] = {}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(specs, key=lambda name: (_RANKING.get(specs[name][0], -1), name)):
        dtype, shape = specs[name][0], list(specs[name][1])
        size = _size_of(dtype, shape)
        if size is None or name == _METADATA:
            raise ConfigurationError(
                f"tensor {name!r} of dtype {dtype!r} and shape {shape} cannot be sent: use the dtypes "
                f"{', '.join(_BITS)}, whole bytes, and another name than {_METADATA}"
            )
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        starts[name] = end
        end += size
    text = _inner_json(entries)
    if len(specs) > MAX_TENSORS:
        raise _too_large(len(specs), len(text))
    return TensorPlaces(text, starts, end)


def _inner_json(entries: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(entries)[1:-1]
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"a name or text of tensors that is not Unicode cannot be sent: {error}") from None


def _too_large(count: int, size: int) -> ConfigurationError:
    return ConfigurationError(
        f"{count} tensors with a header of {size} bytes cannot be sent: at most {MAX_TENSORS} and {MAX_HEADER} bytes"
    )


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode


def _read_header(image: memoryview) -> tuple[dict[str, _Entry], dict[str, str], int]:
    length = int.from_bytes(image[:8], "little")
    if len(image) < 8 or length > min(MAX_HEADER, len(image) - 8):
        raise ProtocolError(f"an image of {len(image)} bytes is not a safetensors file: its header is too long")
    header = bytes(image[8 : 8 + length])
    # Bound the memory of the decoded header before it is built; each tensor has four names.
    if header.count(b":") > 5 * MAX_TENSORS or header.count(b",") > MAX_ELEMENTS:
        raise ProtocolError(f"a safetensors file has more than {MAX_TENSORS} tensors")
    try:
        raw = _decode_header(header)
        metadata = _decode_metadata(raw.pop(_METADATA, b"{}"))
        found = {name: _decode_entry(entry) for name, entry in raw.items()}
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the header of a safetensors file is malformed: {str(error)[:200]}") from None
    if header[:1] != b"{":
        raise ProtocolError("the header of a safetensors file is not a JSON object")
    entries = dict(sorted(found.items(), key=lambda item: item[1].data_offsets))
    end = 0
    for name, entry in entries.items():
        begin, before = entry.data_offsets[0], end
        end = entry.data_offsets[1]
        if begin != before or end - begin != _size_of(entry.dtype, entry.shape):
            raise ProtocolError(f"tensor {name[:80]!r} of a safetensors file has no dtype, shape and offsets that fit")
    if end != len(image) - 8 - length:
        raise ProtocolError(f"a safetensors file has {len(image) - 8 - length} bytes of data, its tensors take {end}")
    return entries, metadata, 8 + length


def _size_of(dtype: Any, shape: Sequence[int]) -> int | None:
    """Return a tensor's size in bytes; ``None`` if it is impossible."""
    are_sizes = all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape)
    if not isinstance(dtype, str) or dtype not in _BITS or not are_sizes or len(shape) > MAX_DIMENSIONS:
        return None
    # Readers that multiply in 64 bits must not overflow, so zero dimensions are ignored here.
    if math.prod(size or 1 for size in shape) > MAX_BYTES:
        return None
    bits = math.prod(shape) * _BITS[dtype]
    return None if bits % 8 else bits // 8

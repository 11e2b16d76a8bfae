"""Tensors as they travel: the bytes of a safetensors file, see https://huggingface.co/docs/safetensors#format.

Eight bytes hold the length of a JSON header (little endian), the header names each tensor's dtype, shape and place, the
tensors follow without holes. Nothing here needs torch, and numpy only :meth:`TensorView.numpy`. ``docs/protocol.md``
says how such an image stands in an event: small ones in the event itself, others in shared memory."""

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


INLINE_BYTES = 1 << 20
"""Up to this size an image travels in its event, and is recorded with it."""

VERSION = 1
MAX_HEADER = 100_000_000  # the format's own limit
MAX_TENSORS = 1 << 17
MAX_ELEMENTS = 1 << 22
MAX_DIMENSIONS = 64
MAX_BYTES = 1 << 48

_METADATA = "__metadata__"

# In the order in which the format's library puts them into a file: it sorts by dtype, the widest first, then by name.
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
"""Gets the image that a segment map stands for from elsewhere, see
:func:`offloop.bus.tensors.segments.fetch_segment`."""


@dataclass(slots=True, eq=False, repr=False)
class TensorView:
    """One tensor of an image, without a copy; of no use once its :class:`Tensors` are closed.

    ``dtype`` is the name that safetensors has for it, such as ``"F32"``; ``data`` are its bytes, little endian and in
    C order, read-only where they are shared memory."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def numpy(self) -> "numpy.ndarray[Any, Any]":
        """The tensor as an array of the same memory; ``BF16``, which numpy lacks, as a copy in float32.

        An array that is kept after its event keeps the memory with it: copy what is to stay.

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
    """The tensors of one image by name, in the order of their bytes; a context manager."""

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
        """Reads an image; the tensors are parts of it. Raises ProtocolError: it is none, or one that passes a limit."""
        view = memoryview(image).cast("B")
        return cls(view, *_read_header(view))

    @property
    def metadata(self) -> Mapping[str, str]:
        """The strings that came with the tensors."""
        return self._metadata

    @property
    def image(self) -> memoryview:
        """The whole image: written to a file, it is a safetensors file."""
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
            raise ClosedError(
                "these tensors are closed: what is needed after its event has to be copied while it lasts"
            )

    def close(self) -> None:
        """Gives the memory back. Arrays, views and images that are still in use keep it until they are not."""
        # Nothing is released under those who may still look at it: that would end the process.
        self._closed = True
        self._views, self._image = {}, memoryview(b"")

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "<Tensors, closed>" if self._closed else f"<Tensors {', '.join(self._views)}>"


def is_tensors(value: Any) -> bool:
    """The value of a field stands for tensors."""
    return isinstance(value, dict) and "$tensors" in value


def open_tensors(value: Any, fetch: Fetch | None = None) -> Tensors:
    """The tensors that the value of a field stands for, from the event or from shared memory.

    Shared memory that is not that of a process on this machine is asked of ``fetch``, if there is one. Close them
    when the event is handled: until then the trainer cannot use that memory again.

    Raises FieldNotAvailableError: they are no longer to be had, and why; ProtocolError: the value or the image is
    malformed."""
    if not isinstance(value, dict) or value.get("$tensors") != VERSION:
        raise ProtocolError(f"a field's tensors are not a map of version {VERSION}: a newer offloop may have sent them")
    image, reference, size = value.get("image"), value.get("segment"), value.get("bytes")
    if isinstance(image, bytes):
        if size != len(image):
            raise ProtocolError(f"a field's tensors are said to take {size!r} bytes, and take {len(image)}")
        return Tensors.from_image(image)
    if not isinstance(reference, dict):
        raise ProtocolError("a field's tensors have neither an image nor a segment")
    segment = SegmentReference.from_wire(reference)
    if size != segment.size:
        raise ProtocolError(f"a field's tensors are said to take {size!r} bytes, their segment has {segment.size}")
    try:
        return Tensors.from_image(open_segment(segment))
    except SegmentElsewhereError:
        if fetch is None:
            raise
        return Tensors.from_image(fetch(reference))


class ImageLayout(NamedTuple):
    """The layout of an image that is yet to be filled."""

    header: bytes
    """The first bytes of the image."""
    starts: dict[str, int]
    """Offset of each tensor's bytes behind the header; in the order of their bytes."""
    size: int
    """Of the whole image, in bytes."""


class TensorPlaces(NamedTuple):
    """The places of tensors of certain dtypes and shapes behind any header: computed once for many images.

    An image is byte for byte the file that the library of the format writes for the same tensors; with more than one
    entry in its metadata it differs in their order, which is the library's by chance and the given one here."""

    entries: bytes
    """Their part of the header."""
    starts: dict[str, int]
    size: int

    def layout(self, metadata: Mapping[str, str] | None = None, align: int = 8) -> ImageLayout:
        """The layout with these strings; the data begin at a multiple of ``align``, of which 8 is the format's own."""
        parts = [] if metadata is None else [_inner_json({_METADATA: dict(metadata)})]
        text = b"{%b}" % b",".join([*parts, *filter(None, [self.entries])])
        text += b" " * (-(len(text) + 8) % align)
        if len(text) > MAX_HEADER:
            raise _too_large(len(self.starts), len(text))
        header = len(text).to_bytes(8, "little") + text
        return ImageLayout(header, self.starts, len(header) + self.size)


def tensor_places(specs: Mapping[str, tuple[str, Sequence[int]]]) -> TensorPlaces:
    """Finds a place for tensors of the given ``(dtype, shape)``.

    Raises ConfigurationError: a name, dtype or shape that cannot stand in an image."""
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


# -- reading a header -------------------------------------------------------------------------------------------------


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode


def _read_header(image: memoryview) -> tuple[dict[str, _Entry], dict[str, str], int]:
    """The entries of an image in the order of their bytes, its metadata, and where its data begin."""
    length = int.from_bytes(image[:8], "little")
    if len(image) < 8 or length > min(MAX_HEADER, len(image) - 8):
        raise ProtocolError(
            f"an image of {len(image)} bytes is not a safetensors file: its header does not fit into it"
        )
    header = bytes(image[8 : 8 + length])
    # Its size in memory is bounded before it is built; each tensor has four names.
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
    """Bytes of a tensor; ``None`` for one that cannot be."""
    are_sizes = all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape)
    if not isinstance(dtype, str) or dtype not in _BITS or not are_sizes or len(shape) > MAX_DIMENSIONS:
        return None
    # A dimension of none makes the others no smaller for those who multiply them in 64 bits.
    if math.prod(size or 1 for size in shape) > MAX_BYTES:
        return None
    bits = math.prod(shape) * _BITS[dtype]
    return None if bits % 8 else bits // 8

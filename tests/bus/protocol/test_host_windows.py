"""What a host says of its ranks travels unchanged; anything else is refused by our error."""

import math

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.host_windows import THROUGHPUT, HostWindow, Quantity, decode_window, encode_window, summarize

_number = st.floats(width=32, allow_nan=False)
_whole = st.integers(0, 2**40)
_ranks = st.lists(_whole, max_size=9, unique=True).map(lambda ranks: tuple(sorted(ranks)))


@st.composite
def windows(draw):
    ranks = draw(_ranks)
    each = lambda values: st.tuples(*[values] * len(ranks))  # noqa: E731
    quantity = st.builds(
        Quantity,
        each(_number),
        *[_number] * 3,
        st.none() | _whole,
        _whole,
        st.none() | st.tuples(_whole, _whole),
    )
    return HostWindow(
        draw(st.text(max_size=20)),
        *draw(st.tuples(_whole)),
        ranks,
        *draw(st.tuples(_whole, _whole, _whole, _whole)),
        draw(_number),
        draw(each(_whole)),
        draw(_ranks)[: len(ranks)],
        draw(st.dictionaries(st.text(max_size=9), quantity, max_size=4)),
    )


@settings(max_examples=60)
@given(windows(), st.integers(0, 10), st.none() | st.text(max_size=2) | st.floats() | st.just([]))
def test_a_window_comes_back_as_it_was_and_one_with_a_part_of_another_type_is_refused(window, place, value):
    assert decode_window(encode_window(window)) == window
    parts = list(msgpack.unpackb(encode_window(window)))
    parts[place] = value
    try:
        read = decode_window(msgpack.packb(parts))
    except ProtocolError:
        return
    assert isinstance(read, HostWindow)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(ProtocolError):
        decode_window(data)


def test_no_more_ranks_can_be_late_than_there_are():
    window = HostWindow("a", 1, (0, 1), 2, 1, 4, 10**18, 1.0, (4, 4), late=(0, 1))
    assert decode_window(encode_window(window)) == window
    with pytest.raises(ProtocolError):
        decode_window(encode_window(replace(window, late=(0, 1, 1))))


def test_a_quantity_names_the_worst_rank_and_leaves_out_what_is_not_finite():
    made = summarize("loss", [8, 9], [[1.0, math.nan, 3.0], [5.0, 5.0, math.inf]], (102, 8))
    assert made == Quantity((2.0, 5.0), 1.0, 3.5, 5.0, 9, 6, (102, 8))
    assert summarize(THROUGHPUT, [8, 9], [[1.0], [5.0]]).worst == 8
    none = summarize("loss", [8], [[]])
    assert (none.worst, none.count) == (None, 0)
    assert math.isnan(none.mean)


def test_numbers_beyond_32_bits_are_left_out():
    for value in (1e39, -1.7e308, math.inf):
        made = summarize("loss", [0, 1], [[value, 1.0, value], [value]], first_nan=(1, 0))
        sent = decode_window(encode_window(HostWindow("h", 1, (0, 1), 2, 1, 3, 3, 1.0, (3, 3), (), {"loss": made})))
        loss = sent.quantities["loss"]
        assert loss.ranks[0] == loss.least == loss.mean == loss.greatest == 1.0
        assert math.isnan(loss.ranks[1])
        assert loss.worst == 0

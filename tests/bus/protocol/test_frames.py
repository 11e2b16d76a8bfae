"""What goes in comes out again, and nothing else gets through."""

import contextlib
import math
import re

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import InvalidRunNameError, ProtocolError
from offloop.bus.protocol.frames import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_FRAME,
    Topic,
    check_run_name,
    decode_body,
    decode_control,
    decode_event,
    decode_positions,
    decode_whole_event,
    encode_body,
    encode_control,
    encode_frame_batch,
    encode_heartbeat,
    event_encoder,
    pack_map,
    split_frame,
)

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z")
topics = st.builds(Topic, names, st.sampled_from(["batch_end", "fit_start", "$end"]), st.integers(0, 4096))
counters = st.lists(st.integers(0, 2**62), min_size=14, max_size=14)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
values = st.recursive(scalars | st.binary(max_size=20), lambda inner: st.lists(inner, max_size=4), max_leaves=10)
maps = st.dictionaries(st.text(max_size=10), values, max_size=6)


@given(topics, st.integers(1, 99), st.integers(1, 2**63 - 1), counters, counters | st.none(), maps, maps)
def test_an_event_comes_out_as_it_went_in(topic, attempt, seq, timestamp, previous, fields, context):
    frame = event_encoder(topic, attempt)(seq, seq // 2, 5, tuple(timestamp), previous, fields, pack_map(context))
    found, body = split_frame(frame)
    event = decode_event(body)
    assert found == topic
    assert (event.attempt, event.seq, event.base_seq, event.time) == (attempt, seq, seq // 2, 5)
    assert (list(event.timestamp), event.fields, event.context) == (timestamp, fields, context)
    assert (event.previous and list(event.previous)) == previous


further = st.recursive(
    scalars | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=40) | st.integers(-5, 2**40) | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)
any_map = st.dictionaries(st.text(max_size=40) | st.integers(0, 99) | st.none(), further, max_size=5)
training_times = st.lists(st.integers(-(2**63), 2**64 - 1), min_size=14, max_size=14)


@st.composite
def events(draw):
    """Draw the elements of an event, with everything that publishers have ever been able to send."""
    seq = draw(st.integers(1, 2**63 - 1))
    numbers = [draw(st.integers(0, 300)), draw(st.integers(1, 2**63 - 1)), seq, draw(st.integers(0, seq))]
    times = [draw(st.integers(0, 2**63 - 1)), draw(training_times), draw(st.none() | training_times)]
    return [*numbers, *times, draw(any_map), draw(any_map), *draw(st.lists(further, max_size=2))]


def by_msgpack(body):
    *numbers, timestamp, previous, fields, context = msgpack.unpackb(body, strict_map_key=False, timestamp=1)[:9]
    return [*numbers, timestamp, previous, fields, context]


def by_us(body):
    *numbers, timestamp, previous, fields, context = event = decode_whole_event(body)
    assert repr(event) == repr(decode_event(body))
    return [*numbers, list(timestamp), previous and list(previous), fields, context]


@given(events())
def test_an_event_is_read_as_another_implementation_reads_it(elements):
    body = msgpack.packb(elements)
    # Their text also tells 1 from 1.0 and True.
    assert repr(by_us(body)) == repr(by_msgpack(body)) == repr([*elements[:5], *by_msgpack(body)[5:7], *elements[7:9]])


@given(events(), st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 3)), max_size=3))
def test_damaged_bytes_are_read_alike_or_refused(elements, changes):
    body = msgpack.packb(elements)
    for position, new, old in changes:
        at = position % len(body)
        body = body[:at] + new + body[at + old :]
    # Further elements are not decoded by us.
    with contextlib.suppress(ProtocolError, UnicodeDecodeError):
        assert repr(by_us(body)) == repr(by_msgpack(body))


@pytest.mark.parametrize("element", [7, 8])
def test_of_extension_types_only_the_time_is_read(element):
    elements = [1, 1, 1, 1, 0, [0] * 14, None, {}, {}]
    elements[element] = {"x": msgpack.Timestamp(2**40, 500_000_000)}
    event = decode_whole_event(msgpack.packb(elements))
    assert tuple(event)[element] == {"x": 2**40 + 0.5}
    assert tuple(decode_event(encode_body(event))) == tuple(event)
    for extension in ({"x": msgpack.ExtType(5, b"abc")}, {msgpack.ExtType(5, b"abc"): 1}):
        elements[element] = extension
        with pytest.raises(ProtocolError, match="extension type 5"):
            decode_whole_event(msgpack.packb(elements))


@pytest.mark.slow
@pytest.mark.parametrize(("element", "bare"), [(7, 0), (8, b"")], ids=["fields", "context with bytes"])
def test_each_limit_of_the_maps_holds(element, bare):
    def event(value):
        elements = [1, 1, 1, 1, 0, [0] * 14, None, {}, {}]
        elements[element] = {"bare": bare, "x": value}
        body = msgpack.packb(elements)
        try:
            found = tuple(decode_event(body))
        except ProtocolError as error:
            with pytest.raises(ProtocolError, match=re.escape(str(error))):
                decode_whole_event(body)
            raise
        assert found == tuple(decode_whole_event(body))
        return found[element]["x"]

    def nested(depth, wrap):
        value = bare
        for _ in range(depth):
            value = wrap(value)
        return value

    for wrap in (lambda value: [value], lambda value: {"k": value}):
        assert event(nested(MAX_DEPTH, wrap)) == nested(MAX_DEPTH, wrap)
        for depth in (MAX_DEPTH + 1, 500):
            with pytest.raises(ProtocolError, match="event 1"):
                event(nested(depth, wrap))
    for empty in ([], {}):
        assert len(event([empty] * (MAX_CONTAINERS - 2))) == MAX_CONTAINERS - 2
        with pytest.raises(ProtocolError, match="arrays and maps"):
            event([empty] * MAX_CONTAINERS)
    assert len(event([0] * MAX_ELEMENTS)) == MAX_ELEMENTS
    with pytest.raises(ProtocolError, match=str(MAX_ELEMENTS)):
        event([0] * (MAX_ELEMENTS + 1))


NUMBERS = msgpack.packb([1, 1, 1, 1, 0, [0] * 14, None, {}])[:-1].replace(b"\x98", b"\x99", 1)


HOSTILE = [
    b"\xdf\xff\xff\xff\xff",
    b"\x81\xa1x\xdd\x7f\xff\xff\xff" + b"\x90" * 50,
    b"\x81\xa1x\xc6\xff\xff\xff\xff",
    b"\x81" * 100_000,
    b"\x81\xa1x" * 100_000 + b"\x01",
    b"\x81\xa1x\xc1",
    b"\x81\xa2\xff\xfe\x01",
    b"\x81\xa1x\xa1\xff",
    b"\x81\x90\x01",
    b"\x81\xa1x\x81\x91\x01\x02",
    b"\x90",
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\x80\x80\x80\x80" * 5 + b"\xc1",
]


def test_hostile_maps_are_refused():
    for fields in HOSTILE:
        for body in (NUMBERS + fields + b"\x80", NUMBERS + b"\x80" + fields):
            with pytest.raises(ProtocolError, match=r": \S| are not a map | elements "):
                tuple(decode_event(body))
            with pytest.raises(ProtocolError):
                decode_whole_event(body)


def test_nan_and_infinity_are_unchanged():
    frame = event_encoder(Topic("r", "batch_end", 0), 1)(
        1, 1, 0, [0] * 14, None, {"loss": math.nan, "norm": -math.inf}, pack_map({})
    )
    fields = decode_event(split_frame(frame)[1]).fields
    assert math.isnan(fields["loss"])
    assert fields["norm"] == -math.inf


@given(st.text(min_size=1, max_size=20), maps)
def test_a_control_message_comes_out_as_it_went_in(kind, content):
    topic, body = split_frame(encode_control(kind, content))
    assert topic is None
    assert decode_control(body) == (kind, content, 1)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_only_protocol_errors(data):
    for decode in (split_frame, decode_body, decode_whole_event, decode_control):
        with contextlib.suppress(ProtocolError):
            decode(data)


def test_further_elements_and_keys_are_ignored():
    body = msgpack.packb([7, 1, 1, 1, 0, [0] * 14, None, {}, {}, "from the future"])
    assert decode_event(body).version == 7
    assert decode_control(msgpack.packb([2, "ack", {"seq": 3, "more": 4}, 5])) == ("ack", {"seq": 3, "more": 4}, 2)


def test_events_of_the_wrong_shape_are_refused():
    right = [1, 1, 1, 1, 0, [0] * 14, None, {}, {}]
    wrong = [
        (0, "1"),
        (1, 0),
        (2, 0),
        (3, 2),
        (3, True),
        (4, 0.5),
        (5, [0] * 13),
        (5, [0] * 13 + ["x"]),
        (6, 3),
        (7, []),
    ]
    changed = [[*right[:place], value, *right[place + 1 :]] for place, value in wrong]
    for body in map(msgpack.packb, (*changed, right[:-1], [], {})):
        with pytest.raises(ProtocolError):
            decode_whole_event(body)
        with pytest.raises(ProtocolError):
            tuple(decode_event(body))


def test_a_reader_checks_the_previous_training_time_and_the_context_when_they_are_used():
    event = decode_event(msgpack.packb([1, 1, 1, 1, 0, [0] * 14, 3, {}, []]))
    for name in ("previous", "context"):
        with pytest.raises(ProtocolError, match="event 1"):
            getattr(event, name)


def test_a_frame_over_the_limit_and_a_topic_of_another_form_are_refused():
    with pytest.raises(ProtocolError, match=f"{MAX_FRAME + 1}.*{MAX_FRAME}"):
        split_frame(b"x" * (MAX_FRAME + 1))
    for topic in (b"run/batch_end", b"run/batch_end/-1", b"run/batch_end/1/2", b"/batch_end/0", b"run//0"):
        with pytest.raises(ProtocolError, match="RUN/EVENT/RANK"):
            split_frame(topic + b"\0\x90")


def test_run_names_are_checked():
    for name in ("a", "digits-3", "A.b_c-9", "x" * 100):
        assert check_run_name(name) == name
    for name in ("", "a/b", "..", ".hidden", "a b", "x" * 101, "ü", "a\n", None):
        with pytest.raises(InvalidRunNameError):
            check_run_name(name)


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_a_batch_holds_its_frames(frames):
    topic, body = split_frame(encode_frame_batch(frames))
    assert topic is None
    assert decode_control(body) == ("events", {"frames": frames}, 1)


def test_a_heartbeat_has_every_position():
    topic, body = split_frame(encode_heartbeat("r", 2, 77, {0: (5, 4)}, 999, {0: (3, 2)}))
    assert topic == ("r", "$beat", 0)
    _, attempt, time, sent, size, on_disk = decode_body(body)
    assert (attempt, time, sent, size, on_disk) == (2, 77, [[0, 5, 4]], 999, [[0, 3, 2]])
    assert decode_positions(sent) == {0: (5, 4)}


def test_positions_of_another_form_are_refused():
    for rows in (None, {"0": [5, 4]}, [[0, 5]], [["0", 5, 4]], [[0, -1, 0]], [5]):
        with pytest.raises(ProtocolError, match="rank, seq and base_seq"):
            decode_positions(rows)

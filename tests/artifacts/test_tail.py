"""Records of a run in progress: each whole line is read once, whatever happens to the file."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from wmcli.artifacts.overview import seconds_of_work
from wmcli.artifacts.tail import Tail, WorkTime, moment


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(file, text):
    with file.open("a") as opened:
        opened.write(text)


def test_each_record_is_read_once_when_its_line_is_whole(file):
    tail = Tail(file)
    assert tail.read() == ([], False, False)
    append(file, '{"a": 1}\n{"a": 2}\n{"a": ')
    assert tail.read() == ([{"a": 1}, {"a": 2}], True, False)
    assert tail.read() == ([], False, False)
    append(file, "3}\n")
    assert tail.read() == ([{"a": 3}], False, False)


def test_a_line_that_a_crash_cut_short_is_left_out(file, run):
    tail = Tail(run.metrics)
    run.log({"update": 1})
    append(run.metrics, '{"update": 2, "lo')
    assert [record["update"] for record in tail.read().records] == [1]
    run.log({"update": 2})  # by the process that resumes
    assert tail.read().records == [{"update": 2}] and run.history() == [{"update": 1}, {"update": 2}]


def test_what_is_no_record_is_left_out(file):
    file.write_bytes(b'[1]\n\n\xff\xfe\n"a"\n' + b"[" * 100_000 + b'\nnull\n{"a": NaN}\r\n')
    (record,) = Tail(file).read().records
    assert record["a"] != record["a"]


def test_another_file_begins_again(file):
    tail = Tail(file)
    append(file, '{"a": 1}\n{"a": 2}\n')
    tail.read()
    file.unlink()
    assert tail.read() == ([], False, False)
    append(file, '{"a": 3}\n')
    assert tail.read() == ([{"a": 3}], True, False)
    other = file.with_name("other")
    append(other, '{"a": 4}\n{"a": 5}\n{"a": 6}\n')
    other.replace(file)  # longer than the one before
    assert tail.read() == ([{"a": 4}, {"a": 5}, {"a": 6}], True, False)
    file.write_text('{"a": 7}\n')  # shorter
    assert tail.read() == ([{"a": 7}], True, False)


def test_a_long_file_is_read_in_parts(file):
    records = [{"a": number} for number in range(1000)]
    append(file, "".join(json.dumps(record) + "\n" for record in records))
    tail, parts = Tail(file), []
    while True:
        growth = tail.read(999)
        parts.append(growth.records)
        if not growth.more:
            break
    assert sum(parts, []) == records and len(parts) > 10
    append(file, "x" * 5000 + '\n{"a": 1}\n')  # a line longer than a part
    while not (growth := tail.read(999)).records:
        assert growth.more
    assert growth.records == [{"a": 1}]


def test_a_folder_in_its_place_is_no_file(file):
    file.mkdir()
    assert Tail(file).read() == ([], False, False)


START = datetime(2024, 5, 1, tzinfo=UTC)


def record(seconds, began=None):
    at = START + timedelta(seconds=seconds)
    return {"time": at.isoformat()} | (
        {} if began is None else {"began": (START + timedelta(seconds=began)).isoformat()}
    )


@pytest.mark.parametrize(
    "records",
    [
        [record(10, 0), record(20, 0), record(100, 90), record(130, 90)],
        [record(10), record(20), record(50)],  # an old version
        [record(10, 0), record(40, 30), record(60, 0), record(70, 30), record(200, 190)],  # two side by side
        [record(10, 0), record(10, 10), record(12, 11)],
    ],
)
def test_time_of_work_is_that_of_all_records(records):
    work = WorkTime()
    assert work.newest is None and work.until(START) == 0
    for count, each in enumerate(records, 1):
        work.add(each)
        for until in range(0, 210, 5):
            end = START + timedelta(seconds=until)
            assert work.until(end) == seconds_of_work(records[:count], end), (count, until)
    assert work.newest == max(moment(each["time"]) for each in records)


def test_the_first_record_of_each_process_is_known_and_odd_ones_are_left_out():
    work = WorkTime()
    assert [work.add(each) for each in (record(1, 0), record(2, 0), record(9, 8), record(10, 8))] == [1, 0, 1, 0]
    for time in (None, 3, "yesterday", "2024-05-01T00:00:00", [], {}):
        assert not work.add({"time": time, "began": "x"})

"""Data files with every defect that users meet: accepted, or refused with the place and the remedy."""

import importlib.util
import json
import os
import re
import tracemalloc

import pytest

from slime_like.data.source import JsonlSource, open_source, same_content


def check(row):
    return (
        None
        if "input" in row
        else f"missing key 'input'; the keys that are there: {', '.join(sorted(row))}"
    )


def open_jsonl(path, **options):
    return open_source(str(path), check=check, columns=["input", "answer"], **options)


def line(i):
    return json.dumps({"input": f"question {i}", "answer": i}).encode() + b"\n"


def write(path, *parts):
    path.write_bytes(b"".join(parts))
    return path


def test_rows_are_read_in_any_order(tmp_path):
    source = open_jsonl(write(tmp_path / "a.jsonl", *map(line, range(50))))
    assert len(source) == 50
    assert [row["answer"] for row in source.rows([49, 0, 17, 17])] == [49, 0, 17, 17]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + line(0) + line(1) + line(2),
        (line(0) + line(1) + line(2)).replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + (line(0) + line(1) + line(2)).replace(b"\n", b"\r\n"),
        line(0) + b"\n  \r\n" + line(1) + line(2),
        (line(0) + line(1) + line(2)).rstrip(b"\n"),
    ],
    ids=["bom", "crlf", "bom-and-crlf", "blank-lines", "no-last-newline"],
)
def test_harmless_forms_keep_every_row(tmp_path, content):
    source = open_jsonl(write(tmp_path / "a.jsonl", content))
    assert [row["answer"] for row in source.rows(range(len(source)))] == [0, 1, 2]


def test_non_ascii_text_survives(tmp_path):
    row = {"input": "naïve \u2028 数学 🙂"}
    source = open_jsonl(
        write(tmp_path / "a.jsonl", json.dumps(row, ensure_ascii=False).encode() + b"\n", line(1))
    )
    assert source.rows([0, 1]) == [row, {"input": "question 1", "answer": 1}]


PREFIX = line(0) + line(1)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            b'{"input": "the end is mis',
            ["a.jsonl:3", "truncated last line", f"byte offset {len(PREFIX)}"],
        ),
        (
            '{"input": "é", oops}\n'.encode(),
            ["a.jsonl:3", "bad JSON", f"byte offset {len(PREFIX) + 16}"],
        ),
        (b'{"input": "\xff"}\n', ["a.jsonl:3", "invalid UTF-8", f"byte offset {len(PREFIX) + 11}"]),
        (b"[1, 2]\n", ["a.jsonl:3", "a JSON array, not an object"]),
        (b"null\n", ["a.jsonl:3", "a JSON null, not an object"]),
        (b'{"question": "x", "label": 1}\n', ["a.jsonl:3", "'input'", "label, question"]),
        (b'{"input": ' + b"[" * 100_000 + b"\n", ["a.jsonl:3", "bad JSON"]),
        (b'{"input": ' + b"1" * 5000 + b"}\n", ["a.jsonl:3", "bad JSON"]),
    ],
    ids=["truncated", "json", "utf8", "array", "null", "key", "nesting", "digits"],
)
def test_a_bad_row_is_refused_by_its_place(tmp_path, bad, words):
    with pytest.raises(ValueError, match="--skip-bad-rows") as caught:
        open_jsonl(write(tmp_path / "a.jsonl", PREFIX, bad))
    for word in words:
        assert word in str(caught.value)


def test_one_bad_line_in_ten_thousand(tmp_path):
    lines = [line(i) for i in range(10_000)]
    lines[7_654] = b'{"input": "x"\n'
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ValueError, match=r"a\.jsonl:7655: bad JSON"):
        open_jsonl(path)
    source = open_jsonl(path, skip_bad_rows=1)
    assert len(source) == 9_999
    (note,) = source.notes
    assert note.startswith(
        f"{path}: skipped 1 bad rows (--skip-bad-rows 1); the first: {path}:7655: bad JSON"
    )
    assert source.rows([7_653, 7_654]) == [
        {"input": "question 7653", "answer": 7653},
        {"input": "question 7655", "answer": 7655},
    ]
    assert source.where(7_654).endswith("a.jsonl:7656")


def test_more_bad_rows_than_allowed(tmp_path):
    path = write(tmp_path / "a.jsonl", line(0), b"x\n", b"y\n", b"z\n")
    assert len(open_jsonl(path, skip_bad_rows=3)) == 1
    with pytest.raises(
        ValueError, match=r"a\.jsonl:4.*more than the 2 bad rows that --skip-bad-rows allows"
    ):
        open_jsonl(path, skip_bad_rows=2)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_empty_file(tmp_path, content):
    with pytest.raises(ValueError, match=r"--prompt-data .*a\.jsonl: the file holds no rows"):
        open_jsonl(write(tmp_path / "a.jsonl", content))


def test_names_that_are_no_data_file(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    write(tmp_path / "a.csv", b"x")
    with pytest.raises(ValueError, match=r"folder\.jsonl: a directory"):
        open_jsonl(tmp_path / "folder.jsonl")
    with pytest.raises(ValueError, match=r"a\.csv: unknown format; legal: \.jsonl, \.parquet"):
        open_jsonl(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"--eval-prompt-data .*none\.jsonl: no such file"):
        open_jsonl(tmp_path / "none.jsonl", flag="--eval-prompt-data")


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ("[0:3]", [0, 1, 2]),
        ("[7:]", [7, 8, 9]),
        ("[:-8]", [0, 1]),
        ("[-2:]", [8, 9]),
        ("[5:99]", [5, 6, 7, 8, 9]),
    ],
)
def test_row_range(tmp_path, bounds, expected):
    path = write(tmp_path / "a.jsonl", *map(line, range(10)))
    source = open_jsonl(f"{path}@{bounds}")
    assert [row["answer"] for row in source.rows(range(len(source)))] == expected
    assert source.where(0).endswith(f":{expected[0] + 1}")


@pytest.mark.parametrize("bounds", ["-:5", "5", "", "a:b", "0:10:2", "1_0:", f"{9**99}:", "0.5:"])
def test_what_is_no_row_range(tmp_path, bounds):
    path = write(tmp_path / "a.jsonl", line(0))
    words = rf"^--eval-prompt-data .*a\.jsonl@.*: '{bounds}' is no range of rows; legal: start:end"
    with pytest.raises(ValueError, match=words):
        open_jsonl(f"{path}@[{bounds}]", flag="--eval-prompt-data")


def test_a_name_that_is_too_long(tmp_path):
    with pytest.raises(ValueError, match=r"^--prompt-data .*x\.jsonl: .* too long"):
        open_jsonl(tmp_path / f"{'x' * 300}.jsonl")


def test_empty_row_range(tmp_path):
    path = write(tmp_path / "a.jsonl", *map(line, range(10)))
    with pytest.raises(ValueError, match=r"empty range; .* has 10 rows"):
        open_jsonl(f"{path}@[10:20]")


def test_a_row_of_ten_megabytes(tmp_path):
    text = "x" * 10_000_000
    source = open_jsonl(
        write(tmp_path / "a.jsonl", line(0), json.dumps({"input": text}).encode() + b"\n", line(2))
    )
    assert source.rows([1])[0]["input"] == text
    assert source.rows([2])[0]["answer"] == 2


def test_memory_does_not_grow_with_the_rows(tmp_path):
    row = json.dumps({"input": "x" * 200_000}).encode() + b"\n"
    path = write(tmp_path / "a.jsonl", *[row] * 100)  # 20 MB
    tracemalloc.start()
    try:
        source = open_jsonl(path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(source) == 100
    assert held < 50_000
    assert peak < 2_000_000


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changed_under_us(tmp_path, kind):
    """Rows that are still readable, and other ones: never used without a word."""
    path = tmp_path / f"a.{kind}"

    def fill(first):
        rows = [{"input": f"question {i}", "answer": i} for i in (first, 1)]
        if kind == "parquet":
            return write_parquet(path, rows)
        return write(path, *(json.dumps(row).encode() + b"\n" for row in rows))

    source = open_jsonl(fill(0))
    before, stat = path.read_bytes(), path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    assert source.rows([0])[0]["answer"] == 0  # touched: the content is the same
    fill(7)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 2 * 10**9))
    with pytest.raises(
        ValueError, match=rf"a\.{kind}: the file has changed since the run opened it"
    ):
        source.rows([1])
    path.unlink()
    with pytest.raises(ValueError, match="the file has changed"):
        source.rows([1])
    path.write_bytes(before)  # put back, as the message says
    assert source.rows([0])[0]["answer"] == 0


def test_two_columns_of_one_name(tmp_path):
    """Of which a dict would keep the last; of columns that nobody reads it does not matter."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = [pa.array([name]) for name in "abcd"]
    table = pa.table(columns, names=["input", "answer", "other", "other"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert open_jsonl(tmp_path / "a.parquet").rows([0]) == [{"input": "a", "answer": "b"}]
    pq.write_table(table.rename_columns(["input", "answer", "answer", "x"]), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: has two columns named 'answer'; rename one"):
        open_jsonl(tmp_path / "b.parquet")


def test_a_damaged_page_names_the_file(tmp_path):
    """A flipped bit within the data of a column, found by the page's checksum."""
    rows = [{"input": f"question {i}", "answer": i} for i in range(50)]
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    path = write_parquet(tmp_path / "a.parquet", rows, **options)
    data = bytearray(path.read_bytes())
    data[data.index(b"question 17")] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"--prompt-data .*a\.parquet: a damaged page"):
        open_jsonl(path)


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"input": "a\ud800"}, "'input' has half of a surrogate pair at character 1"),
        ({"input": "a", "answer": ["\udc00"]}, r"'answer'\[0\] has half"),
        ({"input": "a", "m": {"\ud800": 1}}, "a key has half"),
        ({"input": "a", "m": {"x": {"y": "\udfff"}}}, r"'m'\['x'\]\['y'\] has half"),
    ],
)
def test_half_of_a_surrogate_pair_is_a_bad_row(tmp_path, row, place):
    path = write(tmp_path / "a.jsonl", line(0), json.dumps(row).encode() + b"\n", line(1))
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: {place}"):
        open_jsonl(path)
    source = open_jsonl(path, skip_bad_rows=1)
    assert len(source) == 2 and place.split("[")[0].strip("\\") in source.notes[0]


def test_a_surrogate_pair_is_text(tmp_path):
    source = open_jsonl(write(tmp_path / "a.jsonl", b'{"input": "\\ud83d\\ude42"}\n'))
    assert source.rows([0]) == [{"input": "🙂"}]


def test_content_identifies_the_bytes(tmp_path):
    first = open_jsonl(write(tmp_path / "a.jsonl", line(0), line(1)))
    moved = open_jsonl(write(tmp_path / "b.jsonl", line(0), line(1)))
    other = open_jsonl(write(tmp_path / "c.jsonl", line(1), line(0)))
    assert isinstance(first, JsonlSource)
    assert first.content == moved.content != other.content


def test_content_identifies_the_bytes_of_parquet(tmp_path):
    first, moved, other = (
        open_jsonl(f"{write_parquet(tmp_path / name, [{'input': 'x', 'answer': answer}])}@[0:]")
        for name, answer in (("a.parquet", "2"), ("b.parquet", "2"), ("c.parquet", "9"))
    )
    assert first.content == moved.content != other.content
    assert os.path.getsize(tmp_path / "a.parquet") == os.path.getsize(tmp_path / "c.parquet")
    earlier = re.sub(" crc32=[0-9a-f]{8}", "", first.content)
    assert same_content(earlier, first.content), "a state of a release without the checksum"
    assert not same_content(other.content, first.content)
    jsonl = open_jsonl(write(tmp_path / "a.jsonl", line(0))).content
    assert not same_content(re.sub(" crc32=[0-9a-f]{8}", "", jsonl), jsonl)


def test_values_that_python_cannot_hold_are_bad_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    bytes_of = pa.array([b"good", b"\xff\xfe", b"also"]).buffers()
    answers = {
        "far": pa.array([0, 10**15, 1]).cast(pa.timestamp("s")),
        "fine": pa.array([0, 1, 1000], pa.timestamp("ns")),
        "text": pa.Array.from_buffers(pa.string(), 3, bytes_of),
        "map": pa.array([[], [({"a": 1}, 2)], []], pa.map_(pa.struct([("a", pa.int64())]), pa.int64())),
    }  # fmt: skip
    for kind, answer in answers.items():
        if kind == "fine" and importlib.util.find_spec("pandas") is not None:
            continue  # with which pyarrow makes a Timestamp
        path = tmp_path / f"{kind}.parquet"
        pq.write_table(pa.table({"input": ["a", "b", "c"], "answer": answer}), path)
        with pytest.raises(
            ValueError, match=rf"{kind}\.parquet: row 1: 'answer' is a .*--skip-bad"
        ):
            open_jsonl(path, recorded=lambda row: {})
        if kind == "text":
            source = open_jsonl(path, skip_bad_rows=1)
            assert [row["input"] for row in source.rows([0, 1])] == ["a", "c"]
            assert "row 1: 'answer' is a string that cannot be read" in source.notes[0]


def test_an_empty_map_is_an_object(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    entries = pa.map_(pa.string(), pa.int64())
    nested = pa.struct([("maps", pa.list_(entries)), ("list", pa.list_(pa.string()))])
    answers = [{"maps": [[("k", None)], []], "list": []}, {"maps": [], "list": ["x"]}]
    pq.write_table(
        pa.table({"input": pa.array([[("k", 1)], []], entries), "answer": pa.array(answers, nested)}),
        tmp_path / "a.parquet",
    )  # fmt: skip
    source = open_source(
        str(tmp_path / "a.parquet"), check=lambda row: None, columns=["input", "answer"]
    )
    assert source.rows([0, 1]) == [
        {"input": {"k": 1}, "answer": {"maps": [{"k": None}, {}], "list": []}},
        {"input": {}, "answer": {"maps": [], "list": ["x"]}},
    ]


def write_parquet(path, rows, **options):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def test_parquet_over_row_groups(tmp_path):
    rows = [{"input": f"question {i}", "answer": i, "other": "x" * 100} for i in range(100)]
    source = open_jsonl(write_parquet(tmp_path / "a.parquet", rows, row_group_size=7))
    assert len(source) == 100
    assert source.rows([99, 0, 50, 50]) == [
        {"input": f"question {i}", "answer": i} for i in (99, 0, 50, 50)
    ]


def test_parquet_nested_rows_and_range(tmp_path):
    rows = [{"input": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(10)]
    source = open_jsonl(f"{write_parquet(tmp_path / 'a.parquet', rows)}@[4:6]")
    assert [row["input"] for row in source.rows([0, 1])] == [
        [{"role": "user", "content": "q4"}],
        [{"role": "user", "content": "q5"}],
    ]


def test_parquet_missing_column(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"question": "x", "answer": 1}])
    with pytest.raises(
        ValueError,
        match=r"a\.parquet: row 0: missing key 'input'; the keys that are there: answer, question",
    ):
        open_jsonl(path)


def test_parquet_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable Parquet file"):
        open_jsonl(write(tmp_path / "a.parquet", b"PAR1 nonsense"))


def test_parquet_without_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"input": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="the file holds no rows"):
        open_jsonl(tmp_path / "a.parquet")

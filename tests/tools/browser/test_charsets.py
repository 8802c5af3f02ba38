"""Pages in the character sets that browsers read for their labels."""

import pytest

from outrider.tools.browser.pages import decode_page

# label, text, the codec of Python in which pages with this label are really written
PAGES = [
    ("iso-8859-1", "It\u2019s 5 \u20ac \u2013 \u201cgood\u201d", "cp1252"),
    ("ISO8859-1", "\u2019", "cp1252"),
    ("latin1", "\u2026", "cp1252"),
    ("us-ascii", "caf\xe9", "cp1252"),
    ("iso88591", "\u20ac", "cp1252"),
    ("x-cp1252", "\u20ac", "cp1252"),
    ("iso-8859-9", "\u20ac \u011f", "cp1254"),
    ("latin5", "\u0131\u2019", "cp1254"),
    ("iso-8859-11", "\u20ac \u0e01", "cp874"),
    ("tis-620", "\u0e01\u2026", "cp874"),
    ("windows-874", "\u0e01", "cp874"),
    ("gb2312", "\u6731\u9555\u57fa", "gbk"),
    ("gbk", "\U00020000", "gb18030"),
    ("x-gbk", "\u5317\u4eac", "gbk"),
    ("chinese", "\u9555", "gbk"),
    ("Shift_JIS", "\u2460 \u9ad9\u5cf6 \uff5e", "cp932"),
    ("x-sjis", "\u2460", "cp932"),
    ("windows-31j", "\u9ad9", "cp932"),
    ("euc-kr", "\ub620\ubc29\uac01\ud558", "cp949"),
    ("ks_c_5601-1987", "\ub620", "cp949"),
    ("korean", "\ub620", "cp949"),
    ("windows-949", "\ub620", "cp949"),
    ("big5", "\u88cf\u7c97", "cp950"),
    ("big5-hkscs", "\u88cf", "cp950"),
    ("x-x-big5", "\u55f0", "big5hkscs"),
    ("x-cp1251", "\u043f\u0440\u0438", "cp1251"),
    ("koi8-ru", "\u0457", "koi8-u"),
    ("x-mac-roman", "\xe9", "mac-roman"),
    ("iso-8859-8-i", "\u05d0", "iso8859-8"),
    ("iso-8859-15", "\u20ac", "iso8859-15"),
    ("iso88592", "\u0159", "iso8859-2"),
    ("iso-2022-jp", "\u65e5\u672c", "iso2022_jp"),
    ("euc-jp", "\u65e5\u672c\uff71", "euc_jp"),
    ("x-euc-jp", "\u4e02", "euc_jp"),
    ("utf-16", "caf\xe9 \u5317", "utf-16-le"),
    ("utf-16be", "caf\xe9 \u5317", "utf-16-be"),
    ("unicode-1-1-utf-8", "\u5317", "utf-8"),
    ("UTF-8", "\u5317", "utf-8"),
]


@pytest.mark.parametrize(("label", "text", "codec"), PAGES)
def test_the_label_of_the_server_is_read_as_by_browsers(label: str, text: str, codec: str) -> None:
    assert decode_page(text.encode(codec), label) == text
    assert decode_page(text.encode(codec), f" {label.upper()} ") == text


@pytest.mark.parametrize(("label", "text", "codec"), [page for page in PAGES if "utf-16" not in page[2]])
@pytest.mark.parametrize("declaration", [
    "<meta charset={}>", '<META CHARSET="{}"/>', "<meta name=a><meta charset = '{}' >",
    "<meta http-equiv='Content-Type' content='text/html; charset={}'>",
    '<meta content="text/html;charset={}" http-equiv="content-type">',
    "<?xml version='1.0' encoding='{}'?>", "<!-- <meta charset=koi8-r> --><meta charset={}>",
    "<meta name=description content='charset=koi8-r'><meta charset={}>",
    "<meta charset=unknown><meta charset={}>",
])  # fmt: skip
def test_the_label_of_the_page_is_read_if_the_server_sends_none(
    declaration: str, label: str, text: str, codec: str
) -> None:
    page = declaration.format(label)
    for known in (None, "no-such-set"):
        assert decode_page(page.encode() + text.encode(codec), known) == page + text


def test_a_byte_order_mark_takes_precedence_over_labels() -> None:
    for codec, mark in (
        ("utf-8", b"\xef\xbb\xbf"),
        ("utf-16-le", b"\xff\xfe"),
        ("utf-16-be", b"\xfe\xff"),
    ):
        assert decode_page(mark + "caf\xe9 \u5317".encode(codec), "iso-8859-1") == "caf\xe9 \u5317"


@pytest.mark.parametrize(
    ("content", "label", "text"),
    [
        (b"caf\xc3\xa9", None, "caf\xe9"),
        (b"it\x92s caf\xe9", None, "it\u2019s caf\xe9"),
        (b"caf\xe9", "x-nothing", "caf\xe9"),
        (b"+AGE-", "utf-7", "+AGE-"),
        (b"caf\xe9!", "utf-8", "caf\ufffd!"),
        (b"\x80 5", "gbk", "\u20ac 5"),
        (b"\xad\xa1 \xfc\xe2", "euc-jp", "\u2460 \u9ad9"),
        (b"\x81<p>", "windows-1252", "\x81<p>"),
        (b"\x1b$)C\x0e", "iso-2022-kr", "\ufffd"),
        (b"<meta charset=utf-16>caf\xc3\xa9", None, "<meta charset=utf-16>caf\xe9"),
        (b"", "gb2312", ""),
    ],
)
def test_edge_cases_are_decoded_as_by_browsers(content: bytes, label: str | None, text: str) -> None:
    assert decode_page(content, label) == text


@pytest.mark.parametrize(
    "label", ["gb2312", "shift_jis", "euc-jp", "euc-kr", "big5", "iso-2022-jp", "utf-16"]
)
def test_any_bytes_are_decoded_quickly(label: str) -> None:
    for part in (b"\x8f", b"\xff", b"\x1b$B!", b"<meta ", b"<!--", b'a="', bytes(range(256))):
        assert isinstance(decode_page(part * 1_000, label), str)
        assert isinstance(decode_page(part * 1_000, None), str)

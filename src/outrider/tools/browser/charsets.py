"""Bytes of a page as text, with the character sets that browsers read for its labels.

Source: WHATWG Encoding Standard, "Names and labels", and HTML Standard, "Determining the character encoding".
Python's codecs of the same names are often smaller sets: a page that says ``iso-8859-1`` or ``gb2312`` is
written in ``windows-1252`` or ``gb18030``.
"""

import codecs
import re
from typing import Final

# By the name that Python has for a label: what browsers read instead.
_LARGER: Final = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874",
    "tis-620": "cp874", "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "cp950": "big5hkscs",
    "shift_jis": "cp932", "euc_kr": "cp949", "utf-16": "utf-16-le",
}  # fmt: skip
# Python knows these, and no browser does: the first two are of host names and take time that grows with the
# square of a page, the others hide markup.
_NO_LABELS: Final = frozenset({"punycode", "idna", "utf-7", "hz", "iso2022_kr"})
# Labels that Python does not know, or knows as something else.
_LABELS: Final = {
    label: codec
    for codec, labels in {
        "utf-8": "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8",
        "utf-16-le": "utf-16 ucs-2 iso-10646-ucs-2 csunicode unicode unicodefeff",
        "utf-16-be": "unicodefffe",
        "cp1252": "iso_8859-1:1987 ansi_x3.4-1968 x-user-defined x-cp1252 iso88591",
        "cp1254": "x-cp1254 iso88599",
        "iso8859-6": "iso-8859-6-e iso-8859-6-i csiso88596e csiso88596i iso88596",
        "iso8859-8": "iso-8859-8-e iso-8859-8-i csiso88598e csiso88598i logical visual iso88598",
        "iso8859-7": "sun_eu_greek iso88597",
        "iso8859-15": "csisolatin9 l9 iso885915",
        "koi8-r": "koi koi8",
        "koi8-u": "koi8-ru",
        "mac-roman": "macintosh mac csmacintosh x-mac-roman",
        "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
        "cp866": "866 csibm866",
        "cp874": "dos-874 windows-874 iso885911",
        "gb18030": "x-gbk chinese csgb2312 csiso58gb231280 gb_2312 gb_2312-80 iso-ir-58",
        "big5hkscs": "x-x-big5 cn-big5 csbig5 big5-hkscs",
        "euc_jp": "x-euc-jp cseucpkdfmtjapanese",
        "iso2022_jp": "csiso2022jp",
        "cp932": "x-sjis windows-31j ms_kanji ms932 csshiftjis shift-jis",
        "cp949": "windows-949 iso-ir-149 korean cseuckr csksc56011987 ks_c_5601-1987 ks_c_5601-1989 ksc_5601",
        **{f"cp{number}": f"x-cp{number}" for number in (1250, 1251, 1253, 1255, 1256, 1257, 1258)},
        **{f"iso8859-{number}": f"iso8859{number}" for number in (2, 3, 4, 5, 10, 13, 14)},
    }.items()
    for label in labels.split()
}
# Old encodings in which markup can be hidden: browsers show one U+FFFD instead of the page.
_UNREADABLE: Final = frozenset({
    "hz-gb-2312", "iso-2022-kr", "csiso2022kr", "iso-2022-cn", "iso-2022-cn-ext", "replacement",
})  # fmt: skip
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_HEAD_BYTES: Final = 4096  # browsers read 1024 at first, and later begin anew at a declaration behind those
_COMMENT: Final = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_META: Final = re.compile(rb"<meta[\s/]([^>]*)", re.IGNORECASE)
_ATTRIBUTE: Final = re.compile(rb"""([a-z-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)
_CONTENT_CHARSET: Final = re.compile(rb"""charset\s*=\s*["']?([^\s"';]+)""", re.IGNORECASE)
_XML: Final = re.compile(rb"""\s*<\?xml\s[^>]*?encoding\s*=\s*["']([^"']+)["']""", re.IGNORECASE)
_EUC_JP: Final = re.compile("\x8f[\xa1-\xfe]{2}|\x8e[\xa1-\xdf]|[\xa1-\xfe]{2}|[\x80-\xff]")


def decode_page(content: bytes, charset: str | None) -> str:
    """Decode a page: by its byte order mark, else the server's ``charset``, else the page's own declaration.

    Without any of them it is UTF-8 if it can be, else windows-1252. What cannot be read becomes U+FFFD.
    """
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return _decode(content[len(mark) :], encoding)
    if codec := _codec(charset or ""):
        return _decode(content, codec)
    if codec := _codec(_declared(content[:_HEAD_BYTES])):
        # The declaration was read as ASCII, so the page is not in UTF-16.
        return _decode(content, "utf-8" if codec.startswith("utf-16") else codec)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return _decode(content, "cp1252")


def _codec(label: str) -> str | None:
    """The codec that browsers use for a label; None for what is no label."""
    label = label.strip().lower()
    if label in _UNREADABLE:
        return "replacement"
    if label in _LABELS:
        return _LABELS[label]
    try:
        name = codecs.lookup(label).name
        b"a".decode(name, "ignore")  # what is no text encoding is a LookupError too
    except (LookupError, ValueError):
        return None
    return None if name in _NO_LABELS else _LARGER.get(name, name)


def _declared(head: bytes) -> str:
    """The label that the page declares itself; empty without any."""
    head = _COMMENT.sub(b"", head)
    if xml := _XML.match(head):
        return xml[1].decode("latin-1")
    for meta in _META.finditer(head):
        attributes: dict[bytes, bytes] = {
            name.lower(): double or single or bare
            for name, double, single, bare in _ATTRIBUTE.findall(meta[1])
        }
        label = attributes.get(b"charset")
        if label is None and attributes.get(b"http-equiv", b"").strip().lower() == b"content-type":
            inside = _CONTENT_CHARSET.search(attributes.get(b"content", b""))
            label = inside[1] if inside else None
        if label is not None and _codec(label.decode("latin-1")):
            return label.decode("latin-1")
    return ""


def _decode(content: bytes, codec: str) -> str:
    if codec == "replacement":
        return "\ufffd" if content else ""
    if codec == "euc_jp":
        return _EUC_JP.sub(_euc_jp_character, content.decode("latin-1"))
    try:
        text: str = content.decode(codec, _ERRORS)
        return text
    except ValueError:  # some codecs raise whatever the handler says
        return content.decode("utf-8", "replace")


def _euc_jp_character(match: re.Match[str]) -> str:
    """One character of EUC-JP in the larger set of browsers, which is that of windows-31j."""
    raw = match[0].encode("latin-1")
    if len(raw) != 2:
        return raw.decode("euc_jp", "replace") if len(raw) == 3 else "\ufffd"
    if raw[0] == 0x8E:
        return raw[1:].decode("cp932", "replace")
    row, cell = raw[0] - 0xA0, raw[1] - 0xA0
    lead = (row - 1) // 2 + (0x81 if row <= 62 else 0xC1)
    trail = cell + (0x3F + (cell > 63) if row % 2 else 0x9E)
    return bytes([lead, trail]).decode("cp932", "replace")


def _as_browsers_do(error: UnicodeError) -> tuple[str, int]:
    """Single bytes that Python refuses and browsers read."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    byte = error.object[error.start]
    if error.encoding == "charmap" and 0x80 <= byte < 0xA0:
        return chr(byte), error.start + 1
    if error.encoding == "gb18030" and byte == 0x80:
        return "\u20ac", error.start + 1
    return "\ufffd", error.end


_ERRORS: Final = "outrider-browser"
codecs.register_error(_ERRORS, _as_browsers_do)

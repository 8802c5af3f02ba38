"""Search in languages that put no blanks between words, and corpora without titles."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import DataError
from outrider.tools.browser.pages import BrowserSettings, Page, PageCollection
from outrider.tools.browser.tool import NO_MATCH, Browser, make_reader, read_passages, split_passages
from outrider.tools.search import Passage, SearchConfig, SearchTool, load_passages, query_terms, terms

TEXTS = {
    "zh": "北京是中华人民共和国的首都，位于华北平原。",
    "ja": "東京都は日本の首都である。東京タワーと猫。",
    "ko": "서울은 대한민국의 수도이다.",
    "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย",
    "lo": "ວຽງຈັນເປັນນະຄອນຫຼວງ",
    "km": "ភ្នំពេញជារាជធានីនៃកម្ពុជា",
    "my": "နေပြည်တော်သည်မြန်မာနိုင်ငံ",
    "mixed": "The GPU 芯片H100在台湾生产 in 2023年.",
    "de": "Wien liegt an der Donau.",
}  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> SearchTool:
    return SearchTool([Passage(passage_id=key, title="", text=text) for key, text in TEXTS.items()])


@pytest.mark.parametrize(("query", "hits"), [
    ("首都", {"zh", "ja"}), ("中国的首都", {"zh", "ja"}), ("华北 平原", {"zh"}),
    ("日本", {"ja"}), ("東京都", {"ja"}), ("猫", {"ja"}), ("ﾀﾜｰ", {"ja"}), ("猫咪", {"ja"}),
    ("수도", {"ko"}), ("대한민국", {"ko"}), ("\u1109\u116e\u1103\u1169", {"ko"}),
    ("ประเทศไทย", {"th"}), ("เมือง", {"th"}),
    ("ເປັນ", {"lo"}), ("កម្ពុជា", {"km"}), ("မြန်မာ", {"my"}),
    ("台湾 H100", {"mixed"}), ("H100", {"mixed"}), ("2023", {"mixed"}), ("gpu芯片", {"mixed"}),
    ("Donau", {"de"}), ("南極", set()), ("바나나", set()),
])  # fmt: skip
def test_words_are_found_in_text_without_blanks(tool: SearchTool, query: str, hits: set[str]) -> None:
    assert {passage.passage_id for passage in tool.run(query).passages} == hits


def test_permitted_line_breaks_inside_a_word_do_not_count() -> None:
    word = "កម្ពុជា"
    assert terms("\u200b".join(word)) == terms(word)


LATIN = st.text(alphabet=st.characters(max_codepoint=0x0DFF), max_size=60)


@given(LATIN)
def test_terms_of_languages_with_blanks_are_words(text: str) -> None:
    import re
    import unicodedata

    folded = unicodedata.normalize("NFKD", text).casefold().replace("\u00ad", "")
    letters = "".join(c for c in folded if not unicodedata.combining(c))
    # vowel signs, the marks that remain, belong to words
    signs = "".join(c for c in letters if c >= "\u0780" and unicodedata.category(c) in ("Mn", "Mc"))
    plain = re.findall(rf"[^\W_](?:[^\W_]|[x{signs}])*", letters)  # x: a set must not be empty
    assert terms(text) == query_terms(text) == plain


def test_words_of_indic_scripts_are_not_cut_at_vowel_signs() -> None:
    assert terms("यह मेरा काम है।") == ["यह", "मेरा", "काम", "है"]
    assert terms("বাংলা தமிழ் తెలుగు") == ["বাংলা", "தமிழ", "తెలుగు"]  # accents are removed, as is the virama
    texts = ("कौम का इतिहास", "यह मेरा काम है", "कम पानी", "कमी नहीं है", "दिल की बात", "दल बदल")
    tool = SearchTool([Passage(passage_id=text, title="", text=text) for text in texts])
    for query, index in (("काम", 1), ("कमी", 3), ("दिल", 4)):
        assert [passage.text for passage in tool.run(query).passages] == [texts[index]]


@pytest.mark.parametrize(("text", "words"), [
    ("ශ්\u200dරී ලංකාව", ["ශරී", "ලංකාව"]),  # Sinhala; the virama is removed like an accent
    ("അവന്\u200d വന്നു", ["അവന", "വനനു"]),  # Malayalam
    ("ক্\u200cষ র\u200d্যাম", ["কষ", "রযাম"]),  # Bengali
    ("ދިވެހި ރާއްޖެ", ["ދިވެހި", "ރާއްޖެ"]),  # Thaana
    ("می\u200cروم", ["می", "روم"]),  # Persian
    ("Donau\u00addampf \ufeffBug", ["donaudampf", "bug"]),
])  # fmt: skip
def test_invisible_characters_and_vowel_signs_do_not_cut_words(text: str, words: list[str]) -> None:
    assert terms(text) == words


def test_other_marks_of_class_0_are_no_part_of_words() -> None:
    assert terms("1\ufe0f\u20e3 a\ufe0f b\u034fc") == ["1", "a", "b", "c"]


@given(st.text(max_size=60))
def test_query_terms_are_index_terms_of_any_text(text: str) -> None:
    assert set(query_terms(text)) <= set(terms(text))


@pytest.mark.parametrize("language", ["zh", "ja", "th", "km"])
def test_the_passage_with_the_words_is_read_from_a_long_page(language: str) -> None:
    other = {"zh": "说的是别的事情。", "ja": "これはほかのことだ。", "th": "เรื่องอื่น ",
             "km": "រឿង។"}[language]  # fmt: skip
    page = Page(address="u", title="", text=other * 200 + TEXTS[language] + other * 200)
    word = {"zh": "共和国", "ja": "日本", "th": "ประเทศไทย", "km": "កម្ពុ"}[language]
    read = read_passages(page, word, 100, 600)
    assert word in read and NO_MATCH not in read


def test_sentences_without_blanks_are_unchanged() -> None:
    text = "一二。三四！五六？！七"
    assert list(split_passages(text, 100)) == [text]
    assert list(split_passages(text, 4)) == ["一二。", "三四！", "五六？！", "七"]


NO_TITLES: list[dict[str, Any]] = [
    {"title": None}, {"title": ""}, {"title": "  "}, {}, {"title": float("nan")},
]  # fmt: skip


def corpus(folder: Path, kind: str, title: dict[str, Any]) -> Path:
    texts = ("The kettle is blue.", "The lamp is red.", "The chair is green.")
    rows = [{"id": number, **title, "text": text} for number, text in enumerate(texts, 1)]
    path = folder / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("title", NO_TITLES)
def test_passages_without_titles_are_pages_of_their_own(
    tmp_path: Path, title: dict[str, Any], kind: str
) -> None:
    path = corpus(tmp_path, kind, title)
    assert (
        SearchTool(load_passages(path), SearchConfig(show_ids=True)).run("lamp").text
        == "[2] The lamp is red."
    )
    assert SearchTool(load_passages(path)).run("lamp").text == "The lamp is red."
    settings = BrowserSettings()
    pages = PageCollection.load(path)
    browser = Browser(settings, pages=pages, read=make_reader(settings.reader, settings.max_chars))
    for name in ("2", "[2]", "2 | lamp"):
        assert browser.run_text(name).text == "The lamp is red."
    assert (
        len(pages) == 3
        and pages.find("None") is None
        and pages.find("nan") is None
        and pages.find("") is None
    )


def test_a_page_without_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text('{"title": null, "text": "a"}\n')
    with pytest.raises(DataError, match=r"pages.jsonl:1: a page needs a title, a url or an id"):
        PageCollection.load(path)
    with pytest.raises(DataError, match=r"pages.jsonl:1: no column 'id'"):
        load_passages(path)
    path.write_text('{"id": null, "title": "a", "text": "a"}\n')
    with pytest.raises(DataError, match=r"pages.jsonl:1: column 'id' is null"):
        load_passages(path)


def test_a_title_takes_precedence_over_an_equal_id(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text('{"id": 1, "title": "2", "text": "two"}\n{"id": 2, "title": null, "text": "other"}\n')
    pages = PageCollection.load(path)
    assert len(pages) == 2
    two = pages.find("2")
    assert two is not None and two.text == "two"

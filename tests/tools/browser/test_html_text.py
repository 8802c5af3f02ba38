"""Title and text of untrusted HTML, in time proportional to its length."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.tools.browser.pages import title_and_text


@pytest.mark.parametrize(
    ("page", "title", "text"),
    [
        ("<title>A &amp; B</title><p>one<br>two &lt;3", "A & B", "one\ntwo <3"),
        ("a <b>b</b>c\n d<div>e</div>", "", "a bc d\ne"),
        ("<table><tr><td>1<td>2<tr><td>3</table>", "", "1 2\n3"),
        ("<SCRIPT>if (a<b) '</p>'</Script>x<style>y{}</style >z", "", "xz"),
        ("<script/>a</script>b", "", "b"),
        ("<svg/>a<svg><title>no</title><text>no</text></svg>b", "", "ab"),
        ("a<!-- <p>no --> b<!-->c<!doctype html><?php no ?>d", "", "a bcd"),
        ('<a title="x>y">z</a>', "", "z"),
        ("1 < 2 and 3 > 2 <3", "", "1 < 2 and 3 > 2 <3"),
        ("a<script>never closed", "", "a"),
        ("<title>never closed<p>a", "never closed", "a"),
        ('a<a href="never closed>b</a>c', "", "abc"),
        ("&#" + "9" * 5000 + ";a", "", "&#" + "9" * 5000 + ";a"),
        ("", "", ""),
    ],
)
def test_title_and_text_of_a_page(page: str, title: str, text: str) -> None:
    assert title_and_text(page) == (title, text)


@given(st.text(alphabet="<>/!-\"' \nabptscri&#x;1=", max_size=200))
def test_any_page_is_read_without_blank_lines(page: str) -> None:
    _, text = title_and_text(page)
    assert all(line.strip() for line in text.split("\n")) or not text


@pytest.mark.parametrize(
    "piece",
    [
        "<", "<a ", "<!--", '<a href="', "</", "<![if ", "<?", "<svg>", "<script></s", "<a b ", '<a ">" ',
        "&#x", "<p>a ", "<title>", "<a '\"",
    ],
)  # fmt: skip
def test_time_is_proportional_to_the_length_of_the_page(piece: str) -> None:
    """The parser of the standard library took minutes for some of these."""
    start = time.process_time()
    title_and_text(piece * (400_000 // len(piece)))
    assert time.process_time() - start < 3

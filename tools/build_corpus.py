"""Build the small English corpus that ships inside the package.

The source is a JSON Lines file, xz-compressed, with one novel per line (fields ``id`` and
``text``).  The novels named in ``BOOKS`` are cleaned, cut into documents of some 24 kB at
paragraph boundaries, and split: the last documents of every novel are held out.  The result is
written as ``train.jsonl.xz``, ``heldout.jsonl.xz`` and ``README.md``; the same input gives the
same text in every run, and the same bytes under the same version of liblzma.

Usage::

    python tools/build_corpus.py NOVELS.jsonl.xz [--out DIRECTORY]
    python tools/build_corpus.py NOVELS.jsonl.xz --all novels.jsonl.xz

With ``--all`` every novel of the source from before 1929 is cleaned in the same way and written to one
file, less the paragraphs that the corpus holds out: what the bundled models are trained on.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "src" / "xdlm" / "data" / "corpus"
PIECE_CHARS = 24_000
HELDOUT_SHARE = 0.04
SHARED_CHARS = 60
#: What was published before is in the public domain in the United States.
FREE_BEFORE = 1929


class Book(NamedTuple):
    """One novel: its id in the source, what is known of it, and where its prose begins."""

    source_id: str
    title: str
    author: str
    life: str
    year: int
    start: str


# fmt: off
BOOKS: tuple[Book, ...] = (
    Book("Barclay_Rosary_1909", "The Rosary", "Florence L. Barclay", "1862-1921", 1909,
         "The peaceful stillness of an English summer"),
    Book("Bennet_Helen_1910", "Helen with the High Hand", "Arnold Bennett", "1867-1931", 1910,
         "In the Five Towns human nature"),
    Book("Braddon_Audley_1862", "Lady Audley's Secret", "Mary Elizabeth Braddon", "1835-1915",
         1862, "It lay down in a hollow"),
    Book("Burnett_Garden_1911", "The Secret Garden", "Frances Hodgson Burnett", "1849-1924", 1911,
         "When Mary Lennox was sent"),
    Book("Burnett_Lord_1886", "Little Lord Fauntleroy", "Frances Hodgson Burnett", "1849-1924",
         1886, "Cedric himself knew nothing whatever"),
    Book("Burnett_Princess_1905", "A Little Princess", "Frances Hodgson Burnett", "1849-1924",
         1905, "Once on a dark winter's day"),
    Book("Cbronte_Jane_1847", "Jane Eyre", "Charlotte Bronte", "1816-1855", 1847,
         "There was no possibility of taking a walk"),
    Book("Chesterton_Innocence_1911", "The Innocence of Father Brown", "G. K. Chesterton",
         "1874-1936", 1911, "Between the silver ribbon of morning"),
    Book("Chesterton_Napoleon_1904", "The Napoleon of Notting Hill", "G. K. Chesterton",
         "1874-1936", 1904, "The human race, to which so many"),
    Book("Chesterton_Thursday_1908", "The Man Who Was Thursday", "G. K. Chesterton", "1874-1936",
         1908, "THE suburb of Saffron Park"),
    Book("Conrad_Rover_1923", "The Rover", "Joseph Conrad", "1857-1924", 1923,
         "After entering at break of day"),
    Book("Corelli_Romance_1886", "A Romance of Two Worlds", "Marie Corelli", "1855-1924", 1886,
         "In the winter of 188-"),
    Book("Dickens_Expectations_1861", "Great Expectations", "Charles Dickens", "1812-1870", 1861,
         "My father's family name being Pirrip"),
    Book("Doyle_Hound_1902", "The Hound of the Baskervilles", "Arthur Conan Doyle", "1859-1930",
         1902, "Mr. Sherlock Holmes, who was"),
    Book("Doyle_Lost_1912", "The Lost World", "Arthur Conan Doyle", "1859-1930", 1912,
         "Mr. Hungerton, her father"),
    Book("Galsworthy_Man_1906", "The Man of Property", "John Galsworthy", "1867-1933", 1906,
         "Those privileged to be present"),
    Book("Galsworthy_Saints_1919", "Saint's Progress", "John Galsworthy", "1867-1933", 1919,
         "Such a day made glad the heart"),
    Book("Gissing_Warburton_1903", "Will Warburton", "George Gissing", "1857-1903", 1905,
         "The sea-wind in his hair"),
    Book("Haggard_Mines_1885", "King Solomon's Mines", "H. Rider Haggard", "1856-1925", 1885,
         "It is a curious thing that at my age"),
    Book("Haggard_She_1887", "She", "H. Rider Haggard", "1856-1925", 1887,
         "There are some events of which each"),
    Book("Haggard_Sheallan_1921", "She and Allan", "H. Rider Haggard", "1856-1925", 1921,
         "I believe it was the old Egyptians"),
    Book("Stevenson_Treasure_1883", "Treasure Island", "Robert Louis Stevenson", "1850-1894",
         1883, "SQUIRE TRELAWNEY, Dr. Livesey"),
    Book("Trollope_Angel_1881", "Ayala's Angel", "Anthony Trollope", "1815-1882", 1881,
         "When Egbert Dormer died"),
    Book("Trollope_Phineas_1869", "Phineas Finn", "Anthony Trollope", "1815-1882", 1869,
         "Dr. Finn, of Killaloe"),
    Book("Ward_Ashe_1905", "The Marriage of William Ashe", "Mrs. Humphry Ward", "1851-1920", 1905,
         '"He ought to be here," said Lady'),
    Book("Ward_Harvest_1920", "Harvest", "Mrs. Humphry Ward", "1851-1920", 1920,
         "Two old labourers came out"),
    Book("Ward_Milly_1881", "Milly and Olly", "Mrs. Humphry Ward", "1851-1920", 1881,
         '"Milly, come down! come down'),
    Book("Wcollins_Basil_1852", "Basil", "Wilkie Collins", "1824-1889", 1852,
         "WHAT am I now about to write"),
    Book("Wcollins_Legacy_1889", "The Legacy of Cain", "Wilkie Collins", "1824-1889", 1889,
         "At the request of a person"),
)

PLAIN = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201a": "'", "\u201b": "'", "\u201c": '"', "\u201d": '"',
    "\u201e": '"', "\u00ab": '"', "\u00bb": '"', "\u2013": "--", "\u2014": "--", "\u2015": "--",
    "\u2026": "...", "\u00a0": " ", "\u00ad": "", "\ufeff": "", "\u00e6": "ae", "\u00c6": "Ae",
    "\u0153": "oe", "\u0152": "Oe", "_": "", "\t": " ", "`": "'",
})
# fmt: on
# Accents of Latin-1 are stripped; anything further from ASCII is a scanning error or Greek.
ACCENTS = re.compile(r"[\u00c0-\u00ff]")
DASH = re.compile(r"[ \n]*(?:--+|(?<=[ \n])-(?=[ \n]|$))(?:[ -]*-(?=[ -]|\"|$))* *")
# The source lost its brackets and left two blanks; a pair of commas does the same work.
LOST_BRACKET = re.compile(r"(?<=[a-z]{2})(?<!'[a-z]{2}) {2}(?=[a-z]{2})")
CONTENTS_WORDS = r"chapter|book|part|volume|phase|canto|section|period"
NUMBER = (
    r"[ivxlc]+|\d+|the\s+\w+|first|second|third|one|two|three|four|five|six|seven|eight|nine|ten"
)
HEADING = re.compile(
    rf"(?=[A-Z\d])(?:(?i:{CONTENTS_WORDS})\s+(?i:{NUMBER})\b|[IVXLC]+\.?\s*$|\d+\.?\s*$)"
)
MARKER = re.compile(r"\[(?:illustration|transcriber|footnote|sidenote|note)[^\]]*\]|\[\d+\]", re.I)
OUTSIDE = re.compile(r"gutenberg|transcriber|\be-?text\b|^the end\.?$|^end of\b", re.I)
SENTENCE_END = re.compile(r"[.!?:;,-][\"')]*$|[\"')]$")
COMMON_WORDS = """
the of and to a in that it was i he his you with had as for her she not is but at on be him my
have me said all which so this from they by no were or we there their what an been when who if
would one your are do did could will then them now out up into how
"""
COMMON = frozenset(COMMON_WORDS.split())


def plain_text(text: str) -> str:
    """Bring quotes, dashes, accents and blanks to plain ASCII forms, line by line."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = ACCENTS.sub(lambda m: unicodedata.normalize("NFD", m[0])[0], text.translate(PLAIN))
    text = MARKER.sub("", text)
    text = re.sub(r"\u00a3(\d[\d,]*\d|\d)", r"\1 pounds", text)
    text = re.sub(r"(?<=\b[A-Z])\"(?=[a-z])", "o", text)  # an o with circumflex, misread
    text = re.sub(r"(?<=[.,\"]) \d{1,2} {2}(?=\w)", " ", text)  # a footnote's number
    return LOST_BRACKET.sub(", ", text)


def blocks(text: str) -> Iterator[list[str]]:
    """Yield the paragraphs of a novel as lists of lines, whichever way they are laid out."""
    lines = [line.rstrip() for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    width = lengths[len(lengths) * 95 // 100]
    if width > 120:  # one paragraph per line, but for a few letters and notes
        whole: list[str] = []
        for line in filter(str.strip, lines):
            if whole and not (re.search(r"[a-z,-]$", whole[-1]) and line.lstrip()[0].islower()):
                yield whole
                whole = []
            whole.append(line)
        yield whole
        return
    spaced = len(lengths) < 0.95 * len(lines)
    block: list[str] = []
    for line in lines:
        if block and (not line.strip() or (not spaced and ends_paragraph(block[-1], line, width))):
            yield block
            block = []
        if line.strip():
            block.append(line)
    if block:
        yield block


def ends_paragraph(line: str, following: str, width: int) -> bool:
    """Tell whether a paragraph ends with ``line`` where no blank line shows it."""
    if HEADING.match(line.strip()) or HEADING.match(following.strip()):
        return True
    if is_capitals(line) or is_capitals(following):
        return True
    if not re.search(r"[.!?:-][\"')]*$", line.strip()):
        return False
    room = width - len(line) - 1
    return len(following.split()[0]) <= room or (line.endswith('"') and following.startswith('"'))


def is_capitals(line: str) -> bool:
    """Tell whether a line has capitals and no small letters, as headings do."""
    letters = [c for c in line if c.isalpha()]
    return len(letters) > 3 and all(c.isupper() for c in letters) and line.strip()[0] not in "\"'"


def is_verse(block: list[str], width: int) -> bool:
    """Tell whether a block looks like verse, a list or an inscription."""
    if len(block) < 3:
        return False
    return sum(len(line.strip()) < 0.72 * width for line in block[:-1]) > 0.7 * (len(block) - 1)


def join(block: list[str]) -> str:
    """Join the lines of a paragraph and tidy its blanks, dashes and opening capitals."""
    text = re.sub(r"(?<=[a-z])-\n\s*(?=[a-z])", "-", "\n".join(block))
    text = DASH.sub("--", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"^(?:\* ?){2,}", "", text)
    text = re.sub(r"\. ?\. ?\.(?: ?\.)*", "...", text)
    text = re.sub(r"(?<=\w) (?=[,.;:!?](?:[ \"']|$))", "", text)
    text = re.sub(r"^\" (?=\w)", '"', text)
    return re.sub(r"(?<=[a-z,]) \"$", '--"', text)  # the source lost a dash here


def lower_opening(text: str) -> str:
    """Undo the capitals in which the first words of a chapter are often set."""
    match = re.match(r"([\"']?)([A-Z]{2,}[,;]?(?: [A-Z]+\b[,;]?(?= ))*)(?= [a-zA-Z])", text)
    if not match:
        return text
    words = [w if w.rstrip(",;") == "I" else w.lower() for w in match[2].split()]
    words[0] = words[0].capitalize()
    return match[1] + " ".join(words) + text[match.end() :]


def is_prose(text: str) -> bool:
    """Tell whether a paragraph is ASCII English prose rather than notes, lists or Latin."""
    if not text.isascii() or OUTSIDE.search(text) or is_capitals(text):
        return False
    if re.search(r"[|<>{}\\@#=*~^\[\]]", text) or not re.search(r"[a-z]", text):
        return False
    if len(text) < 70 and not SENTENCE_END.search(text):
        return False
    words = re.findall(r"[a-z']+", text.lower())
    if len(words) >= 15 and sum(w in COMMON for w in words) < 0.13 * len(words):
        return False
    return sum(c.isupper() for c in text) < 0.3 * len(text) or len(text) < 30


def prose_of(book: Book, text: str) -> list[str]:
    """The paragraphs of a novel from its opening words on."""
    start = text.find(book.start)
    if start < 0:
        raise ValueError(f"{book.source_id}: its opening words {book.start!r} were not found")
    return paragraphs(text[start:])


def paragraphs(text: str) -> list[str]:
    """Clean one novel and return its paragraphs, without headings and what is not prose."""
    text = plain_text(text)
    found = list(blocks(text))
    lengths = sorted(len(line) for block in found for line in block)
    width = lengths[len(lengths) * 95 // 100]
    kept: list[str] = []
    after_heading = True
    for block in found:
        joined = join(block)
        if len(joined) < 120 and (HEADING.match(joined) or is_capitals(joined)):
            after_heading = True
            continue
        if after_heading and len(joined) < 90 and not re.search(r"[.!?:;,\"-]['\")]*$", joined):
            continue
        if (width <= 120 and is_verse(block, width)) or not is_prose(joined):
            continue
        kept.append(lower_opening(joined) if after_heading else joined)
        after_heading = False
    return kept


def pieces(paras: list[str]) -> list[list[str]]:
    """Cut a novel into documents of nearly equal size, near ``PIECE_CHARS`` each."""
    total = sum(len(p) + 1 for p in paras)
    count = max(2, round(total / PIECE_CHARS))
    cut: list[list[str]] = [[] for _ in range(count)]
    done = 0
    for para in paras:
        cut[min(count - 1, done * count // total)].append(para)
        done += len(para) + 1
    return [piece for piece in cut if piece]


def write_jsonl(path: Path, documents: Iterable[dict[str, str]]) -> int:
    """Write documents as compressed JSON Lines and return the size of the file in bytes."""
    data = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents).encode("utf-8")
    path.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    return path.stat().st_size


def readme(rows: list[tuple[Book, list[int]]], sizes: dict[str, int]) -> str:
    """Return the description that stands beside the corpus."""
    table = [
        f"| {b.title} | {b.author} ({b.life}) | {b.year} | {nt} | {ct:,} | {nh} | {ch:,} |"
        for b, (nt, ct, nh, ch) in rows
    ]
    sums = [sum(column) for column in zip(*(counts for _, counts in rows), strict=True)]
    lines = [
        "# The embedded English corpus",
        "",
        f"{len(rows)} English novels in {sums[0] + sums[2]} documents, {sums[1] + sums[3]:,} "
        "characters of plain ASCII prose.",
        "",
        *[f"- `{name}`: {size:,} bytes" for name, size in sizes.items()],
        "",
        "Each line is a JSON object with `id`, `title` and `text`; in `text`, one line is one "
        "paragraph.",
        "",
        "## Licence",
        "",
        "All novels here were first published before 1929 by authors who died in 1936 or "
        "earlier. They are in the public domain in the United States and in countries whose "
        "term of protection is the author's life and 70 years. No rights are claimed in the "
        "cleaned text.",
        "",
        "## Origin",
        "",
        "The novels come from a collection of one hundred public-domain English novels, one "
        "text file each, which names no printed edition or digital source for most of them. "
        "The texts bear no Project Gutenberg header or licence. "
        "`tools/build_corpus.py` holds the list of the novels and all cleaning steps.",
        "",
        "## Cleaning and split",
        "",
        "Front matter, headings, verse, notes and paragraphs that are not English prose or not "
        "ASCII after accents are dropped; lines are joined to paragraphs; quotes, dashes "
        "(`--`) and ellipses are plain ASCII. The source lost the dashes of some novels (The "
        "Rosary, Lady Audley's Secret, the three by Burnett, Will Warburton, Treasure Island), "
        "most brackets and some accented letters; where a pair of blanks shows a lost bracket, "
        "a comma stands in its place.",
        "",
        f"Each novel is cut at paragraph boundaries into documents of about {PIECE_CHARS:,} "
        f"characters. The last {HELDOUT_SHARE:.0%} of its documents (rounded, at least one) are "
        f"held out. Held-out paragraphs of {SHARED_CHARS} characters or more that also stand in "
        "the training part are removed from the held-out part.",
        "",
        "| Title | Author | Year | Train docs | Train chars | Held-out docs | Held-out chars |",
        "|---|---|---|---:|---:|---:|---:|",
        *table,
        f"| **Total** | | | {sums[0]} | {sums[1]:,} | {sums[2]} | {sums[3]:,} |",
        "",
    ]
    return "\n".join(lines)


def build(source: Path, out: Path) -> None:
    """Read the novels at ``source`` and write the corpus into ``out``."""
    wanted = {book.source_id for book in BOOKS}
    texts: dict[str, str] = {}
    with lzma.open(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["id"] in wanted:
                texts[record["id"]] = record["text"]
    missing = sorted(wanted - texts.keys())
    if missing:
        raise SystemExit(f"not in {source.name}: {', '.join(missing)}")

    split: list[tuple[Book, list[list[str]], list[list[str]]]] = []
    for book in BOOKS:
        cut = pieces(prose_of(book, texts[book.source_id]))
        held = max(1, round(HELDOUT_SHARE * len(cut)))
        split.append((book, cut[:-held], cut[-held:]))
    seen = {p for _, train, _ in split for piece in train for p in piece if len(p) >= SHARED_CHARS}

    documents: dict[str, list[dict[str, str]]] = {"train": [], "heldout": []}
    rows: list[tuple[Book, list[int]]] = []
    for book, train, heldout in split:
        slug = re.sub(r"[^a-z0-9]+", "-", book.title.lower().replace("'", "")).strip("-")
        heldout = [[p for p in piece if p not in seen] for piece in heldout]
        counts: list[int] = []
        for part, parts, first in (("train", train, 0), ("heldout", heldout, len(train))):
            bodies = ["\n".join(piece) for piece in parts]
            documents[part] += [
                {"id": f"{slug}-{first + i:03d}", "title": book.title, "text": body}
                for i, body in enumerate(bodies)
            ]
            counts += [len(bodies), sum(map(len, bodies))]
        rows.append((book, counts))

    out.mkdir(parents=True, exist_ok=True)
    sizes = {
        f"{part}.jsonl.xz": write_jsonl(out / f"{part}.jsonl.xz", docs)
        for part, docs in documents.items()
    }
    (out / "README.md").write_text(readme(rows, sizes), encoding="utf-8")
    for name, size in sizes.items():
        print(f"{name}: {size:,} bytes")


def build_all(source: Path, out: Path, corpus: Path) -> None:
    """Write all novels at ``source`` but for what ``corpus`` holds out, in documents as there."""
    with lzma.open(corpus / "heldout.jsonl.xz", "rt", encoding="utf-8") as lines:
        held = {p for line in lines for p in json.loads(line)["text"].split("\n")}
    documents, size = [], 0
    with lzma.open(source, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if int(record["id"][-4:]) >= FREE_BEFORE:
                continue
            kept = [p for p in paragraphs(record["text"]) if p not in held]
            for i, piece in enumerate(pieces(kept)):
                documents.append({"id": f"{record['id']}-{i:03d}", "text": "\n".join(piece)})
                size += len(documents[-1]["text"])
    write_jsonl(out, documents)
    print(f"{out}: {len(documents):,} documents, {size:,} characters")


def main() -> None:
    """Parse the command line and build the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="novels as xz-compressed JSON Lines")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory to write to")
    parser.add_argument("--all", type=Path, help="write all novels, for training, to this file")
    args = parser.parse_args()
    if args.all is not None:
        build_all(args.source, args.all, args.out)
    else:
        build(args.source, args.out)


if __name__ == "__main__":
    main()

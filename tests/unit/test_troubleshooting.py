"""docs/troubleshooting.md quotes every refusal of the code, with its remedy, and none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from refusal_texts import VLLM, quoted, raised, sections, text_of, yielded

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = sections()


def rows(heading: str) -> list[tuple[str, str]]:
    """The cells of a section's table."""
    part = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in part.splitlines() if line.startswith("| ")]
    assert all(len(row) == 2 for row in cells)
    return [(says, more) for says, more in cells[1:]]


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_has_each_text_and_no_other(heading: str) -> None:
    found = rows(heading)
    assert [says for says, _ in found] == list(dict.fromkeys(map(quoted, SECTIONS[heading])))
    assert all(more.strip() for _, more in found)


def test_all_sources_of_refusals_are_looked_at() -> None:
    """Each reason that nitro.integration.vllm.refusals yields is one of the page's, or made by a function of compat."""
    source = (VLLM / "refusals.py").read_text(encoding="utf-8")
    in_words = list(yielded(VLLM / "refusals.py"))
    assert len(in_words) + source.count("yield untested") + source.count("yield from") == source.count("yield ")
    assert len(SECTIONS["At start-up: versions that were not tested"]) == 4


@pytest.mark.parametrize("text", [text for texts in list(SECTIONS.values())[:1] for text in texts])
def test_each_reason_names_a_remedy(text: str) -> None:
    assert re.search(r"; (use|drop|serve|disable)|; .* without Nitro|: Nitro runs on|drop it|use --", text) or (
        "serve this model without Nitro" in text
    )


def test_flags_and_variables_of_the_page_exist_in_the_code_or_are_vllms() -> None:
    known = set(re.findall(r"NITRO_\w+", "\n".join(p.read_text("utf-8") for p in (ROOT / "nitro").rglob("*.py"))))
    assert set(re.findall(r"NITRO_\w+", PAGE)) <= known


def test_texts_are_read_out_of_sources(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        'def f(x):\n    yield f"x={x!r} is bad; " "drop it"\n    yield x\n'
        '    raise KeyError(f"no {x}" + ", sorry")\n    raise ValueError("other")\n'
    )
    assert list(yielded(file)) == ["x=… is bad; drop it"]
    assert list(raised(file, "KeyError")) == ["no …, sorry"]
    assert text_of(None) is None

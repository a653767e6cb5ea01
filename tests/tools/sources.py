"""Fill the last column of docs/sources.md: which notebooks, documents and modules cite an entry.

.venv/bin/python tests/tools/sources.py

An entry that nobody cites goes. A citation without an entry is printed: open it, read it, and
write its row.
"""

from __future__ import annotations

import sys

from citations import LIST, all_citations, is_cited, places, row_of


def main() -> int:
    citations, lines, entries = all_citations(), [], []
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if row := row_of(line):
            row = row._replace(cited_in=places(row.source, citations))
            if not row.cited_in:
                print("cited nowhere, taken out:", row.link)
                continue
            entries.append(row.source)
            line = f"| {' | '.join(row)} |"
        lines.append(line)
    LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")
    missing = [
        f"{name} cites {source.kind} {source.place} {source.name}: no entry"
        for name, cited in citations.items()
        for source in sorted(cited)
        if not any(is_cited(entry, source) for entry in entries)
    ]
    print("\n".join(missing) or f"{len(entries)} entries, all of them cited")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())

"""Small PDFs."""

from __future__ import annotations

HELVETICA = "/Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding"
ENCRYPT = f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'01' * 32}> /U <{'02' * 32}> >> /ID [<00> <00>]"


def pdf(*pages: str, encrypt: str = "") -> bytes:
    """A PDF of pages with these contents, in which /F is the font."""
    kids = " ".join(f"{number} 0 R" for number in range(4, 4 + 2 * len(pages), 2))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>"]
    objects.append(f"<< /Type /Font /Subtype {HELVETICA} >>")
    for content in pages:
        resources = f"/MediaBox [0 0 200 100] /Resources << /Font << /F 3 0 R >> >> /Contents {len(objects) + 2} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R {resources} >>")
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    text, table = "%PDF-1.7\n", "0000000000 65535 f \n"
    for number, body in enumerate(objects, 1):
        table += f"{len(text):010} 00000 n \n"
        text += f"{number} 0 obj\n{body}\nendobj\n"
    size = len(objects) + 1
    trailer = f"trailer << /Size {size} /Root 1 0 R {encrypt} >>\nstartxref\n{len(text)}\n%%EOF"
    return f"{text}xref\n0 {size}\n{table}{trailer}".encode("ascii")


def said(*lines: str) -> str:
    """The content of a page."""
    return f"BT /F 12 Tf 20 90 Td {' 0 -20 Td '.join(f'({line}) Tj' for line in lines)} ET"

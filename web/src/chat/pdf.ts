/** The text of PDFs. The page loads this, and pdf.js with it, when the first PDF comes. */

import { getDocument, PDFWorker, VerbosityLevel, type PDFDocumentProxy } from "pdfjs-dist/legacy/build/pdf.mjs";
import Worker from "pdfjs-dist/legacy/build/pdf.worker.min.mjs?worker";

/** Why a PDF has no text for us; each is a text of the page. */
export type PDFProblem = "pdfLocked" | "pdfDamaged" | "pdfScanned" | "pdfEncoding" | "pdfLong";

/** Its text, page after page with an empty line between them; at most so many characters. Rejects if pdf.js cannot be loaded. */
export async function readPDF(file: Blob, most: number): Promise<{ text: string } | { problem: PDFProblem }> {
  const data = new Uint8Array(await file.arrayBuffer());
  const port = new Worker();
  const failed = new Promise<never>((_, reject) => {
    port.onerror = (event) => reject(new Error(event.message || "the worker of pdf.js cannot be loaded"));
  });
  try {
    return await Promise.race([read(data, PDFWorker.create({ port }), most), failed]);
  } finally {
    port.terminate();
  }
}

async function read(data: Uint8Array<ArrayBuffer>, worker: PDFWorker, most: number): Promise<{ text: string } | { problem: PDFProblem }> {
  let encoding = false;
  /** pdf.js has 1.7 MB of tables for encodings of East Asian fonts, which are not served. */
  class NoTables {
    fetch({ kind }: { kind: string }): Promise<never> {
      encoding ||= kind === "cMapUrl";
      return Promise.reject(new Error(`no ${kind} is served`));
    }
  }
  const settings = { useWorkerFetch: false, useWasm: false, useSystemFonts: true, disableFontFace: true };
  let text: string | null;
  try {
    text = await joined(await getDocument({ data, worker, BinaryDataFactory: NoTables, verbosity: VerbosityLevel.ERRORS, ...settings }).promise, most);
  } catch (error) {
    return { problem: error instanceof Error && error.name === "PasswordException" ? "pdfLocked" : "pdfDamaged" };
  }
  if (encoding) return { problem: "pdfEncoding" };
  if (text === null) return { problem: "pdfLong" };
  return text.trim() ? { text } : { problem: "pdfScanned" };
}

/** null where the text is longer. */
async function joined(document: PDFDocumentProxy, most: number): Promise<string | null> {
  const pages: string[] = [];
  let length = 0;
  for (let number = 1; number <= document.numPages; number++) {
    const { items } = await (await document.getPage(number)).getTextContent();
    const page = items.map((item) => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : "")).join("").trim();
    length += page.length;
    if (length > most) return null;
    if (page) pages.push(page);
  }
  return pages.join("\n\n");
}

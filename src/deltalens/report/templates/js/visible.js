// Text as it is, made visible: what would be invisible or would act on its surroundings becomes a labelled glyph.
const NAMED = {
  0x00a0: "NBSP", 0x00ad: "SHY", 0x061c: "ALM", 0x180e: "MVS", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM",
  0x2028: "LS", 0x2029: "PS", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO", 0x202f: "NNBSP", 0x2060: "WJ",
  0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM", 0xfffd: "�",
};
const INVISIBLE = /[\p{Cf}\p{Cc}\p{Co}\p{Cn}\p{Cs}\p{Zl}\p{Zp}\u00a0\u2000-\u200a\u202f\u205f\u3000\ufffd\ufe00-\ufe0f]/u;
// How tokenizers spell bytes that are no character on their own.
const BYTES = /^(<0x[0-9A-F]{2}>)+$/i;
const JOINS = /^[\u200c\u200d\ufe0f]$/u;

function glyphFor(character) {
  const code = character.codePointAt(0);
  const hex = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  if (character === "\n") return ["↵", `newline, ${hex}`];
  if (character === "\t") return ["⇥", `tab, ${hex}`];
  if (code < 0x20) return [String.fromCharCode(0x2400 + code), `control character, ${hex}`];
  if (code === 0x7f) return ["␡", `control character, ${hex}`];
  if (code === 0xfffd) return ["�", "part of a character: bytes that are no text on their own"];
  return [NAMED[code] || hex, hex];
}

// Joiners and variation selectors between two other characters of a token shape these and are kept.
const shapes = (characters, i) => JOINS.test(characters[i]) && i > 0 && (i < characters.length - 1 || characters[i] === "\ufe0f");

function visible(text, { running }) {
  if (BYTES.test(text)) return text.match(/[0-9A-F]{2}/gi).map((hex) => el("span", { class: "glyph", title: `byte 0x${hex}: part of a character`, dir: "ltr" }, hex));
  const characters = Array.from(text);
  const out = [];
  let plain = "";
  const flush = () => { if (plain) out.push(document.createTextNode(plain)); plain = ""; };
  characters.forEach((character, i) => {
    if (character === " " && !running) { flush(); out.push(el("span", { class: "space" }, "·")); return; }
    if (!INVISIBLE.test(character) || shapes(characters, i)) { plain += character; return; }
    flush();
    const [label, title] = glyphFor(character);
    const faint = character === "\n" || character === "\t";
    out.push(el("span", { class: faint ? "glyph faint" : "glyph", title, dir: "ltr" }, label));
    if (running && character === "\n") plain += "\n";
    if (running && character === "\t") plain += "\t";
  });
  flush();
  if (!characters.length) out.push(el("span", { class: "glyph", title: "empty token" }, "∅"));
  return out;
}

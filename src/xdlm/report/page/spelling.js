/** Token text made fit to show: what is invisible becomes a sign. A line break is both shown and made. */
const JOINERS = "\u200c\u200d"; // part of how some scripts and emoji are written

export function visible(text) {
  if (text === "") return "∅";
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (character) => {
    if (character === "\n") return "↵\n";
    if (JOINERS.includes(character)) return character;
    const code = character.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

export const quoted = (text) => (text === null ? "[mask]" : `“${visible(text).replaceAll("↵\n", "↵")}”`);
export const percent = (probability) => `${(100 * probability).toFixed(1)} %`;

/**
 * Display of text that a person decides by: names, arguments, results, questions. An invisible character is replaced by its
 * code. Prose is isolated instead. The terminal displays the same (`midstream.cli.visible_text`).
 */

import { INVISIBLE } from "./invisible.js";

const ranges = INVISIBLE.map(([first, last]) => `\\u{${first.toString(16)}}-\\u{${last.toString(16)}}`).join("");
/** The invisible characters, and the bracket of a code, so that a text cannot imitate a code. */
const SHOWN_BY_CODE = new RegExp(`[${ranges}]|\u27e8(?=U\\+)`, "gu");
const UNSEEN = new RegExp(`[${ranges}]`, "gu");

function hex(number) {
  return number.toString(16).toUpperCase().padStart(4, "0");
}

/** Replace each invisible character by its code, such as `\u27e8U+202E\u27e9`. */
export function visible(text) {
  return text.replace(SHOWN_BY_CODE, (character) => `\u27e8U+${hex(character.codePointAt(0))}\u27e9`);
}

/** Replace each invisible character of a JSON document by its escape, for editing. The value stays the same. */
export function escaped(document) {
  return document.replace(UNSEEN, (character) =>
    [...Array(character.length).keys()]
      .map((unit) => `\\u${hex(character.charCodeAt(unit)).toLowerCase()}`)
      .join(""),
  );
}

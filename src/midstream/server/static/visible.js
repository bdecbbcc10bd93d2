/**
 * Text that a person decides by: names, arguments, results, questions. A character that takes no ink is shown by its
 * code; prose is isolated instead. The terminal shows the same (`midstream.cli.visible_text`).
 */

import { INVISIBLE } from "./invisible.js";

const ranges = INVISIBLE.map(([first, last]) => `\\u{${first.toString(16)}}-\\u{${last.toString(16)}}`).join("");
/** The table; and the bracket of a code, so that a text cannot pretend to have one. */
const SHOWN_BY_CODE = new RegExp(`[${ranges}]|\u27e8(?=U\\+)`, "gu");
const UNSEEN = new RegExp(`[${ranges}]`, "gu");

function hex(number) {
  return number.toString(16).toUpperCase().padStart(4, "0");
}

/** Replace each invisible character by its code, as `\u27e8U+202E\u27e9`. */
export function visible(text) {
  return text.replace(SHOWN_BY_CODE, (character) => `\u27e8U+${hex(character.codePointAt(0))}\u27e9`);
}

/** Replace each invisible character of a JSON document by its escape: the same value, for a box that is edited. */
export function escaped(document) {
  return document.replace(UNSEEN, (character) =>
    [...Array(character.length).keys()]
      .map((unit) => `\\u${hex(character.charCodeAt(unit)).toLowerCase()}`)
      .join(""),
  );
}

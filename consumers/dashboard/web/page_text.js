// Numbers for people. A scale is a list of [factor, suffix], smallest factor first, from the server: memory/used_bytes has
// [1, " B"], [1024, " KiB"] and so on. Without a scale a number is plain.

const PLAIN = [[1, ""], [1e6, "M"]];
const SMALLEST_PLAIN = 1e-4;
const LARGEST_PLAIN = 1e9;

const formats = new Map();

export const SECONDS = [[1e-6, " µs"], [1e-3, " ms"], [1, " s"]];

// Returns the unit of values of that size: [factor, suffix].
export function unitOf(size, scale) {
  const plain = !scale?.length;
  if (plain && size && (size < SMALLEST_PLAIN || size >= LARGEST_PLAIN)) {
    const power = Math.floor(Math.log10(size));
    return [10 ** power, `e${power}`];
  }
  const units = plain ? PLAIN : scale;
  return units.findLast(([factor]) => factor <= size) || (size ? units[0] : units.find(([factor]) => factor >= 1) || units[0]);
}

export function valueText(value, scale, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const [factor, suffix] = unitOf(Math.abs(value), scale);
  const written = value / factor;
  // Digits before the point are not rounded.
  const whole = Math.ceil(Math.log10(Math.abs(written) + 1));
  return grouped(Number(written.toPrecision(Math.max(digits, whole)))) + suffix;
}

// With separators for thousands, and all digits.
export function grouped(value, decimals) {
  // Making a format takes far longer than using it.
  let format = formats.get(decimals);
  if (!format) {
    const digits = decimals === undefined ? { maximumFractionDigits: 20 } : { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
    format = new Intl.NumberFormat("en", digits);
    formats.set(decimals, format);
  }
  return format.format(value);
}

export function secondsText(value) {
  return valueText(value, SECONDS, 3);
}

// A place on the axis of time, such as 1h05m or 12.5s, as precise as `step` needs.
export function clockText(value, step = 1) {
  const decimals = decimalsOf(Math.min(step, 1));
  const rounded = Number(Math.abs(value).toFixed(decimals));
  const [days, hours] = [Math.floor(rounded / 86400), Math.floor(rounded / 3600) % 24];
  const [minutes, rest] = [Math.floor(rounded / 60) % 60, rounded % 60];
  const parts = [[days, "d"], [hours, "h"], [minutes, "m"], [rest, "s"]];
  const first = parts.findIndex(([amount]) => amount);
  if (first < 0) return "0s";
  const last = parts.findLastIndex(([amount]) => amount);
  const text = parts.slice(first, last + 1).map(([amount, letter], place) => {
    const written = letter === "s" ? rest.toFixed(decimals) : String(amount);
    return (place ? written.padStart(letter === "s" && decimals ? 3 + decimals : 2, "0") : written) + letter;
  });
  return (value < 0 ? "-" : "") + text.join("");
}

// The decimals that distinguish numbers `step` apart.
export function decimalsOf(step) {
  for (let decimals = 0; decimals < 20; decimals++) {
    const shifted = step * 10 ** decimals;
    if (Math.abs(shifted - Math.round(shifted)) < 1e-6 * shifted) return decimals;
  }
  return 20;
}

// Files that the page saves.
const REVOKE_MS = 60000;
const LONGEST_NAME = 100;

export function saveCanvas(canvas, name) {
  const file = name.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, LONGEST_NAME) || "chart";
  canvas.toBlob((blob) => {
    const url = URL.createObjectURL(blob);
    saveUrl(url, `${file}.png`);
    setTimeout(() => URL.revokeObjectURL(url), REVOKE_MS);
  });
}

export function saveUrl(url, name = "") {
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
}

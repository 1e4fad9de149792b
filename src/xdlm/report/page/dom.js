export const byId = (id) => document.getElementById(id);

/** A new last child of `parent`. */
export function element(parent, tag, text, className) {
  const child = document.createElement(tag);
  if (text !== undefined) child.textContent = text;
  if (className) child.className = className;
  parent.append(child);
  return child;
}

// The address has the view and its state, so that Back and reload show both again.

export function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: new URLSearchParams(query ?? "") };
}

// Writes values of the view's state into the present address; empty ones are left out of it.
export function keep(values) {
  const { query } = address();
  for (const [name, value] of Object.entries(values))
    if (String(value ?? "") === "") query.delete(name);
    else query.set(name, value);
  const text = String(query);
  history.replaceState(null, "", (location.hash.split("?")[0] || "#/") + (text && `?${text}`));
}

// The overview of a run: the server draws it, because report.html has the same one.

import { ask } from "./data.js";
import { h } from "./dom.js";

export async function showOverview(run) {
  const element = h("section");
  const draw = async () => {
    const { html } = await ask("overview", { run: run.id });
    element.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
  };
  await draw();
  return { element, title: "Overview", refresh: draw };
}

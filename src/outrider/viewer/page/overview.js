// The server draws the overview, because report.html has the same one.

import { ask } from "./data.js";
import { h } from "./dom.js";

export async function showOverview(run) {
  const element = h("section");
  let last;
  const draw = async () => {
    const { html } = await ask("overview", { run: run.id });
    if (html === last) return;
    last = html;
    const { hash } = element.querySelector(":focus") ?? {};
    element.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
    element.querySelector(`[href="${hash}"]`)?.focus();
  };
  await draw();
  return { element, title: "Overview", refresh: draw };
}

// News of the run that is looked at, as server-sent events; a page of a bundle hears none.

import { still } from "./data.js";

let source = null;
let followed = null;

export function follow(run, onNews) {
  if (still) return;
  if (run !== null && followed?.id === run.id) {
    followed.current = run;
    run.state = followed.state;
    return;
  }
  source?.close();
  source = followed = null;
  if (run === null) return;
  const mine = { id: run.id, current: run, state: null };
  followed = mine;
  source = new EventSource(`events?run=${encodeURIComponent(run.id)}`);
  source.onmessage = (event) => {
    const before = mine.state;
    mine.state = JSON.parse(event.data);
    if (followed === mine) onNews(mine.current, mine.state, before);
  };
}

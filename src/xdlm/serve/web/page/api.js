/** The server's routes, with the key if one is needed. */

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "xdlm-key";
export const keep = (key) => sessionStorage.setItem(KEY, key);

function headers() {
  const key = sessionStorage.getItem(KEY);
  const known = key ? { Authorization: `Bearer ${key}` } : {};
  return { "Content-Type": "application/json", ...known };
}

async function checked(answer) {
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refused(answer.status, body?.error?.message ?? `the server answered ${answer.status}`);
}

export async function models() {
  const answer = await checked(await fetch("v1/models", { headers: headers() }));
  return (await answer.json()).data;
}

function post(path, body, signal) {
  return fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
}

/** The same generation again, as a file. */
export async function saved(body, format) {
  return (await checked(await post("v1/trajectory", { ...body, format }))).blob();
}

/** The events of a generation, as they come. */
export async function* generation(body, signal) {
  const answer = await checked(await post("v1/infill", {
    ...body, stream: true, stream_options: { include_usage: true },
  }, signal));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the server went away");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new Refused(told.error.code, told.error.message);
      yield told;
    }
  }
}

// Keeps the page up to date. The server makes every text and every path; here they are only put in
// their places. If the page has other parts than before, all of it is loaded again.
'use strict';

const query = () => location.search;
const main = () => document.getElementById('main');
let events = null;
let again = 0;
let loading = false;

function link(state, text) {
  const e = document.getElementById('link');
  e.dataset.s = state;
  e.textContent = text;
}

function apply(news) {
  for (const [id, text] of Object.entries(news.text || {})) {
    const e = document.getElementById(id);
    if (!e) continue;
    e.textContent = text;
    if (e.dataset.s !== undefined) e.dataset.s = text;
  }
  for (const [id, d] of Object.entries(news.path || {})) {
    const e = document.getElementById(id);
    if (e) e.setAttribute('d', d);
  }
  if (news.shape !== main().dataset.shape) reload();
}

async function reload() {
  if (loading) return;
  loading = true;
  try {
    const answer = await fetch(location.pathname + query(), {cache: 'no-store'});
    const text = await answer.text();
    const fresh = new DOMParser().parseFromString(text, 'text/html').getElementById('main');
    if (answer.ok && fresh) {
      const focus = document.activeElement && document.activeElement.id;
      main().replaceWith(fresh);
      buttons();
      const e = focus && document.getElementById(focus);
      if (e) e.focus({preventScroll: true});
      connect(); // what was sent meanwhile went to the old parts
    }
  } catch {
    // The events tell when the daemon is there again.
  } finally {
    loading = false;
  }
}

function disconnect() {
  clearTimeout(again);
  if (events) events.close();
  events = null;
}

function connect() {
  disconnect();
  events = new EventSource('events' + query());
  events.onmessage = (e) => {
    link('live', 'live');
    apply(JSON.parse(e.data));
  };
  events.addEventListener('end', () => link('lost', 'the daemon has stopped'));
  events.onerror = () => {
    if (events.readyState !== EventSource.CLOSED) {
      link('lost', 'connection lost, trying again');
      return;
    }
    link('full', 'not live: trying again');
    again = setTimeout(connect, 10000);
  };
}

async function copy(button) {
  const from = document.getElementById(button.dataset.copy);
  let done = false;
  try {
    await navigator.clipboard.writeText(from.textContent);
    done = true;
  } catch {
    // Browsers have no clipboard for pages that come over plain HTTP from elsewhere.
    getSelection().selectAllChildren(from);
    done = document.execCommand('copy');
  }
  button.textContent = done ? 'Copied' : 'Press Ctrl-C';
  setTimeout(() => { button.textContent = 'Copy'; }, 2000);
}

function buttons() {
  for (const b of document.querySelectorAll('button.copy')) {
    b.hidden = false;
    b.addEventListener('click', () => copy(b));
  }
}

document.addEventListener('visibilitychange', () => {
  if (document.hidden) disconnect();
  else connect();
});

buttons();
connect();

// One state, many views: a view names the fields it draws from and is called once per frame after they change.
const listeners = [];
const state = {};
let pending = null;

function onChange(fields, draw) {
  listeners.push({ fields, draw });
}

function setState(patch) {
  let changed = false;
  pending ??= new Set();
  for (const [key, value] of Object.entries(patch)) {
    if (state[key] === value) continue;
    state[key] = value;
    pending.add(key);
    changed = true;
  }
  if (!changed || pending.scheduled) return;
  pending.scheduled = true;
  requestAnimationFrame(() => {
    const keys = pending;
    pending = null;
    for (const { fields, draw } of listeners) if (fields.some((f) => keys.has(f))) draw(keys);
  });
}

function drawAll() {
  for (const { draw } of listeners) draw(new Set());
}

"use strict";
(() => {
  // Theme: as the system, light, dark; kept for the next look where the browser lets a file keep anything.
  const names = { "": "as the system", light: "light", dark: "dark" }, order = ["", "light", "dark"];
  const button = document.getElementById("theme"), root = document.documentElement;
  const keep = (value) => { try { localStorage.setItem("eagle-theme", value); } catch { /* not kept */ } };
  const show = (value) => {
    if (value) root.dataset.theme = value; else delete root.dataset.theme;
    button.querySelector("span").textContent = names[value];
  };
  let kept = "";
  try { kept = localStorage.getItem("eagle-theme") || ""; } catch { /* nothing kept */ }
  show(kept in names ? kept : "");
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(root.dataset.theme || "") + 1) % order.length];
    show(next);
    keep(next);
  });
  // On paper every table is open.
  const closed = [];
  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details:not([open])")) { each.open = true; closed.push(each); }
    root.dataset.screen = root.dataset.theme || "";
    root.dataset.theme = "light";
  });
  addEventListener("afterprint", () => {
    for (const each of closed.splice(0)) each.open = false;
    show(root.dataset.screen || "");
  });
})();

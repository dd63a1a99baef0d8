// The page: which view is shown, panels, keys, and the rhythm in which the fleet is asked for.

import { ApiError, fleet as fetchFleet, useKey, whenUnauthorized } from "./api.js";
import { Chat } from "./chat.js";
import { h, say } from "./dom.js";
import { Rates } from "./rates.js";
import { Settings } from "./settings.js";
import { refusalText } from "./talk.js";

// What is asked for while nobody has looked at the fleet.
const NO_INTERVALS = { since: Number.MAX_SAFE_INTEGER, lengthS: 2, model: "" };
const FLEET_EVERY_MS = 1000;
const ASIDE_EVERY_MS = 4000;
const $ = (id) => document.getElementById(id);
const settings = new Settings($("settings"));
const chat = new Chat(settings);
const rates = new Rates();
// The view of the fleet, loaded when it is first shown.
let fleet;
let loadingFleet;

// --- views and panels -------------------------------------------------------------------------------------------------

function view() {
  return location.hash === "#fleet" ? "fleet" : "chat";
}

function showView() {
  const name = view();
  document.body.dataset.view = name;
  for (const one of ["chat", "fleet"]) {
    $(one).hidden = one !== name;
    $(`tab-${one}`).toggleAttribute("aria-current", one === name);
    if (one === name) $(`tab-${one}`).setAttribute("aria-current", "page");
  }
  document.title = name === "fleet" ? "Fleet – headrace" : "headrace";
  closePanels();
  if (name === "fleet" && !fleet) loadFleet();
  wake();
}

async function loadFleet() {
  loadingFleet ??= import("./fleet.js");
  try {
    const { Fleet } = await loadingFleet;
    fleet ??= new Fleet($("fleet"), rates, wake);
    wake();
  } catch {
    loadingFleet = undefined;
    $("fleet").replaceChildren(h("p", { class: "notice bad", role: "alert" }, "The gateway does not answer; see whether the server runs and the network is there, then reload this page."));
  }
}

function openPanel(panel, toggle, isOpen) {
  if (panel === $("settings")) panel.hidden = !isOpen;
  panel.classList.toggle("open", isOpen);
  toggle.setAttribute("aria-expanded", String(isOpen));
  $("scrim").hidden = !document.querySelector(".sidebar.open, .settings.open");
}

function closePanels() {
  for (const [panel, toggle] of [["sidebar", "menu"], ["settings", "settings-toggle"]]) {
    if ($(panel).contains(document.activeElement)) $(toggle).focus();
    openPanel($(panel), $(toggle), false);
  }
}

function toggleSettings() {
  const opening = $("settings").hidden;
  openPanel($("settings"), $("settings-toggle"), opening);
  if (opening) $("settings").querySelector("textarea, input").focus();
  else $("settings-toggle").focus();
}

/** Go to the field that searches conversations; on a narrow page, open the side with it. */
function search() {
  if ($("menu").offsetParent) openPanel($("sidebar"), $("menu"), true);
  $("search").focus();
}

$("menu").addEventListener("click", () => openPanel($("sidebar"), $("menu"), !$("sidebar").classList.contains("open")));
$("settings-toggle").addEventListener("click", toggleSettings);
$("scrim").addEventListener("click", closePanels);
$("sidebar").addEventListener("click", (event) => event.target.closest("a, #new-chat") && openPanel($("sidebar"), $("menu"), false));
addEventListener("hashchange", showView);

addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (document.querySelector(".sidebar.open, .settings.open")) closePanels();
    else chat.escape();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey) {
    const action = { KeyN: () => chat.startNew(), KeyS: toggleSettings, KeyK: search, Digit1: () => (location.hash = "#chat"), Digit2: () => (location.hash = "#fleet") }[event.code];
    if (action) {
      event.preventDefault();
      action();
    }
  } else if (event.key === "/" && view() === "chat" && !event.target.closest("input, textarea, select")) {
    event.preventDefault();
    $("prompt").focus();
  }
});

// --- API key ----------------------------------------------------------------------------------------------------------

whenUnauthorized((hadKey) => {
  if (hadKey) say($("key-problem"), "The gateway does not know this key. Check it, or ask its operator for another.");
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key").focus();
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  say($("key-problem"), "");
  useKey($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  chat.picker.refresh();
  wake();
});

// --- the fleet --------------------------------------------------------------------------------------------------------

let timer;
let asking = false;
let isWanted = false;

/** Ask for the fleet now, and then again and again: often while it is shown, never while the page is hidden. */
async function wake() {
  clearTimeout(timer);
  isWanted = asking; // what is asked for may be another thing now
  if (document.hidden || asking) return;
  asking = true;
  try {
    const asked = fleet?.asked ?? NO_INTERVALS;
    const answer = await fetchFleet(asked);
    rates.take(answer.workers);
    if (asked !== NO_INTERVALS) fleet.update(answer, asked);
    showPulse(answer);
    chat.takeDefaults(answer.models);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    fleet?.fail(refusalText(error));
    pulse("unreachable", error.status === 401 ? "an API key is needed" : "the gateway does not answer");
  } finally {
    asking = false;
    timer = setTimeout(wake, isWanted ? 0 : view() === "fleet" ? FLEET_EVERY_MS : ASIDE_EVERY_MS);
  }
}

function showPulse({ workers, problem }) {
  const { rate, ready, count } = rates.pulse(workers);
  if (problem) return pulse("unreachable", "the router does not answer");
  if (!ready) return pulse("unreachable", count ? `none of ${count} workers is ready` : "no worker is ready");
  const names = count === 1 ? "worker" : "workers";
  const text = ready === count ? `${count} ${names} ready` : `${ready} of ${count} ${names} ready`;
  pulse("ready", rate >= 1 ? `${text} · ${Math.round(rate)} tokens/s` : text);
}

function pulse(state, text) {
  $("pulse").querySelector(".dot").dataset.state = state;
  say($("pulse").querySelector(".pulse-text"), text);
}

document.addEventListener("visibilitychange", wake);
showView();
if (view() === "chat" && matchMedia("(pointer: fine)").matches) $("prompt").focus();

// Light, dark, or as the system says. Runs before the first paint, so that the page never shows in another theme first.
globalThis.theme = {
  get() {
    try {
      return localStorage.getItem("headrace.theme") ?? "";
    } catch {
      return "";
    }
  },
  set(name) {
    try {
      localStorage.setItem("headrace.theme", name);
    } catch {
      // It lasts as long as the page then.
    }
    this.show(name);
  },
  show(name) {
    document.documentElement.dataset.theme = name;
  },
};
theme.show(theme.get());

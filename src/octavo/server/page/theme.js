/* Light or dark: the reader's choice if there is one, else the system's. Runs before the page is drawn. */
(() => {
  "use strict";
  const root = document.documentElement, KEY = "octavo-theme";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is switched off: the choice lasts as long as the page
    }
  };
  let chosen = stored();

  function apply() {
    const name = chosen ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = name;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = name === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", name === "dark" ? "Switch to light colours" : "Switch to dark colours");
    }
    document.dispatchEvent(new Event("octavo-theme"));
  }

  function toggle() {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, chosen);
    } catch (error) {
      console.info("The colours are not remembered:", error.message);
    }
    apply();
  }

  apply();
  dark.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", toggle);
  });
})();
